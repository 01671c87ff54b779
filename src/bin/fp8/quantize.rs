//! `fp8 quantize`: a model in high precision into FP8.

use crate::output::Target;
use crate::progress::Bar;
use crate::source;
use anyhow::{Context, Result, bail};
use fp8::rewrite::{self, QuantizeOptions, Scheme, Spelling};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    /// The model: a directory with safetensors files, or a GGUF file
    model: PathBuf,
    /// channel-token, block128, mxfp8, static-tensor, dynamic-tensor, tensor-token, weight-only or weight-only:GRANULARITY
    #[arg(long, default_value_t = Scheme::ChannelToken)]
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
    #[command(flatten)]
    target: Target,
}

pub fn run(args: &Args) -> Result<()> {
    let input_amaxes = match &args.amaxes {
        Some(path) => read_amaxes(path)?,
        None if args.scheme.needs_calibration() => {
            bail!(
                "--scheme {} needs the inputs' amaxes: give --amaxes FILE",
                args.scheme
            )
        }
        None => BTreeMap::new(),
    };
    let options = QuantizeOptions::new(args.scheme)
        .with_spelling(args.to)
        .with_ignore(args.ignore.clone())
        .with_head(args.head)
        .with_input_amaxes(input_amaxes)
        .with_write(args.target.options());
    let model = source::open(&args.model)?;
    let mut bar = Bar::new("quantize")?;
    let report = rewrite::quantize(&*model, &args.target.out, &options, &mut |p| bar.show(p))?;
    drop(bar);
    args.target.print(&report)
}

fn read_amaxes(path: &Path) -> Result<BTreeMap<String, f32>> {
    const LIMIT: u64 = 64 << 20;
    let text = fp8::read::read_text(path, LIMIT)?;
    serde_json::from_str(&text)
        .with_context(|| format!("{} is no JSON object of numbers by path", path.display()))
}
