//! `fp8 quantize`: makes an FP8 checkpoint of a model in high precision.

use crate::output::Target;
use crate::progress::{BYTES, Bar, COUNT};
use crate::source;
use crate::usage::{Usage, at_least};
use anyhow::{Context, Result, bail};
use candle_core::{Device, Tensor};
use fp8::rewrite::{self, QuantizeOptions, Scheme, Spelling};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    /// The model: a directory with safetensors files, or a GGUF file
    model: PathBuf,
    /// channel-token, block128, mxfp8, static-tensor, dynamic-tensor, tensor-token, weight-only (a scale per channel) or
    /// weight-only:GRANULARITY, which is tensorwise, rowwise, blockwise:ROWSxCOLS (as blockwise:128x128) or mx
    #[arg(long, value_name = "SCHEME", default_value_t = Scheme::ChannelToken)]
    scheme: Scheme,
    /// compressed-tensors, fp8-blocks (DeepSeek, Qwen), autofp8 or modelopt
    #[arg(long, value_name = "SPELLING", default_value_t = Spelling::CompressedTensors)]
    to: Spelling,
    /// Layers that stay in high precision: paths, globs, or `re:` and a regular expression
    #[arg(long, value_name = "PATTERN")]
    ignore: Vec<String>,
    /// Quantize the head too
    #[arg(long)]
    head: bool,
    /// For static-tensor: a JSON object of the largest absolute input of each layer, by path
    #[arg(long, value_name = "FILE")]
    amaxes: Option<PathBuf>,
    /// For static-tensor: a text to run the model on to find them
    #[arg(long, value_name = "FILE", conflicts_with = "amaxes")]
    calibrate: Option<PathBuf>,
    /// Samples to take from the text, of 512 tokens or the model's positions if it has fewer
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least(1))]
    samples: usize,
    #[command(flatten)]
    target: Target,
}

pub fn run(args: &Args) -> Result<()> {
    let input_amaxes = match (&args.amaxes, &args.calibrate) {
        (Some(path), _) => read_amaxes(path)?,
        (None, Some(text)) => calibrate(&args.model, text, args.samples)?,
        (None, None) if args.scheme.needs_calibration() => {
            let scheme = args.scheme;
            let why = "needs the inputs' amaxes: give --calibrate TEXT or --amaxes FILE";
            return Err(Usage(format!("--scheme {scheme} {why}")).into());
        }
        (None, None) => BTreeMap::new(),
    };
    let options = QuantizeOptions::new(args.scheme)
        .with_spelling(args.to)
        .with_ignore(args.ignore.clone())
        .with_head(args.head)
        .with_input_amaxes(input_amaxes)
        .with_write(args.target.options());
    let model = source::open(&args.model)?;
    let mut bar = Bar::new("quantize", BYTES)?;
    let report = rewrite::quantize(&*model, &args.target.out, &options, &mut |p| bar.show(p))?;
    drop(bar);
    args.target.print(&report)
}

fn read_amaxes(path: &Path) -> Result<BTreeMap<String, f32>> {
    const LIMIT: u64 = 64 << 20;
    let text = fp8::read::read_text(path, LIMIT)?;
    serde_json::from_str(&text)
        .with_context(|| format!("{} is not a JSON object of numbers by path", path.display()))
}

/// Tokens of a sample, for models with as many positions.
const SAMPLE: usize = 512;

/// The largest inputs of each layer while the model reads a text.
fn calibrate(model: &Path, text: &Path, samples: usize) -> Result<BTreeMap<String, f32>> {
    let bytes = fp8::read::read_bytes(text, source::MAX_TEXT)?;
    let source = crate::model::Source::of(model);
    let ids = source
        .tokenizer()?
        .encode(&String::from_utf8_lossy(&bytes), true)?;
    let loaded = source.load_high_precision()?;
    let positions = loaded.max_positions().unwrap_or(SAMPLE);
    let samples: Vec<&[u32]> = ids.chunks(SAMPLE.min(positions)).take(samples).collect();
    if samples.is_empty() {
        bail!("{}: no token to calibrate with", text.display());
    }
    let mut bar = Bar::new("calibrate", COUNT)?;
    let count = samples.len() as u64;
    let amaxes = rewrite::input_amaxes(&loaded, || {
        for (i, sample) in samples.iter().enumerate() {
            if bar.at("", i as u64, count).is_break() {
                return Err(fp8::Error::Files(fp8::FilesError::Cancelled));
            }
            let ids = Tensor::from_slice(sample, (1, sample.len()), &Device::Cpu)?;
            loaded.forward(&ids).map_err(candle_core::Error::from)?;
        }
        Ok(())
    })?;
    drop(bar);
    Ok(amaxes)
}
