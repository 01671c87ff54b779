//! `fp8 merge`: a model with an adapter added to its weights.

use crate::dequantize::Precision;
use crate::model;
use crate::output::Target;
use crate::progress::{BYTES, Bar};
use crate::quantize::Choice;
use crate::source;
use crate::usage::Usage;
use anyhow::Result;
use fp8::fp8_files::adapter::AdapterFile;
use fp8::rewrite::{self, Merged, Scheme};
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// The base: a directory with safetensors files in FP8 or high precision, or a GGUF file
    base: PathBuf,
    /// The adapter: a directory with adapter_config.json and adapter_model.safetensors, as PEFT writes it
    adapter: PathBuf,
    /// Dtype of all weights [default: each keeps its own; those that were FP8 get the model's]
    #[arg(long, value_enum, conflicts_with = "scheme")]
    dtype: Option<Precision>,
    /// Write FP8 by this scheme of `fp8 quantize`, instead of high precision
    #[arg(long, value_name = "SCHEME")]
    scheme: Option<Scheme>,
    #[command(flatten)]
    choice: Choice,
    #[command(flatten)]
    target: Target,
}

pub fn run(args: &Args) -> Result<()> {
    if let (None, Some(flag)) = (args.scheme, args.choice.given()) {
        return Err(Usage(format!("{flag} is for FP8: it needs --scheme")).into());
    }
    let base = source::open(&args.base)?;
    let adapter = AdapterFile::open(&args.adapter)?;
    let merged = Merged::new(&*base, &adapter)?;
    let write = args.target.options();
    let report = match args.scheme {
        None => {
            let dtype = args.dtype.map(Precision::dtype);
            let mut bar = Bar::new("merge", BYTES)?;
            rewrite::dequantize(&merged, &args.target.out, dtype, &write, &mut |p| {
                bar.show(p)
            })?
        }
        Some(scheme) => {
            let tuned = model::Source::of(&args.base).with_adapter(&args.adapter);
            let options = args.choice.options(scheme, write, &tuned)?;
            let mut bar = Bar::new("merge", BYTES)?;
            rewrite::quantize(&merged, &args.target.out, &options, &mut |p| bar.show(p))?
        }
    };
    let (layers, adapter) = (merged.layers().len(), args.adapter.display());
    eprintln!("{layers} layers have an update of {adapter}");
    args.target.print(&report)
}
