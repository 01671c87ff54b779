//! `fp8 quantize`: makes an FP8 checkpoint of a model in high precision.

use crate::output::Target;
use crate::progress::{BYTES, Bar, COUNT};
use crate::source::{self, MAX_TEXT};
use crate::usage::{Usage, at_least};
use anyhow::{Context, Result, bail};
use candle_core::{Device, Tensor};
use fp8::rewrite::{self, QuantizeOptions, Scheme, Spelling, WriteOptions};
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
    #[command(flatten)]
    choice: Choice,
    #[command(flatten)]
    target: Target,
}

/// What to quantize and how to spell it.
#[derive(clap::Args)]
pub struct Choice {
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
}

impl Choice {
    /// The first flag that was given, if any.
    pub fn given(&self) -> Option<&'static str> {
        let given = [
            (self.to != Spelling::default(), "--to"),
            (!self.ignore.is_empty(), "--ignore"),
            (self.head, "--head"),
            (self.amaxes.is_some(), "--amaxes"),
            (self.calibrate.is_some(), "--calibrate"),
        ];
        given
            .into_iter()
            .find_map(|(given, flag)| given.then_some(flag))
    }

    /// The options for a scheme; `model` is run for its inputs' amaxes, if a text was given for that.
    pub fn options(
        &self,
        scheme: Scheme,
        write: WriteOptions,
        model: &crate::model::Source,
    ) -> Result<QuantizeOptions> {
        let input_amaxes = match (&self.amaxes, &self.calibrate) {
            (Some(path), _) => read_amaxes(path)?,
            (None, Some(text)) => calibrate(model, text, self.samples)?,
            (None, None) if scheme.needs_calibration() => {
                let why = "needs the inputs' amaxes: give --calibrate TEXT or --amaxes FILE";
                return Err(Usage(format!("--scheme {scheme} {why}")).into());
            }
            (None, None) => BTreeMap::new(),
        };
        Ok(QuantizeOptions::new(scheme)
            .with_spelling(self.to)
            .with_ignore(self.ignore.clone())
            .with_head(self.head)
            .with_input_amaxes(input_amaxes)
            .with_write(write))
    }
}

pub fn run(args: &Args) -> Result<()> {
    let runs = crate::model::Source::of(&args.model);
    let write = args.target.options();
    let options = args.choice.options(args.scheme, write, &runs)?;
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
fn calibrate(
    source: &crate::model::Source,
    text: &Path,
    samples: usize,
) -> Result<BTreeMap<String, f32>> {
    let bytes = fp8::read::read_bytes(text, MAX_TEXT)?;
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
