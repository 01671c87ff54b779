//! `fp8 dequantize`: an FP8 checkpoint as an ordinary one.

use crate::output::Target;
use crate::progress::{BYTES, Bar};
use crate::source::Opening;
use crate::usage::Usage;
use anyhow::Result;
use candle_core::DType;
use clap::ValueEnum;
use fp8::rewrite;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// The checkpoint
    dir: PathBuf,
    /// Dtype of all weights [default: the model's for FP8 weights; the others keep theirs]
    #[arg(long, value_enum)]
    dtype: Option<Precision>,
    #[command(flatten)]
    target: Target,
    #[command(flatten)]
    opening: Opening,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum Precision {
    F32,
    Bf16,
    F16,
}

impl Precision {
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
        }
    }
}

pub fn run(args: &Args) -> Result<()> {
    if let Some(flag) = args.opening.of_inputs().or(args.target.of_caches()) {
        let text = format!("{flag} is for FP8 layers, and the output has none");
        return Err(Usage(text).into());
    }
    args.target.check([&*args.dir])?;
    let dtype = args.dtype.map(Precision::dtype);
    let checkpoint = args.opening.open(&args.dir)?;
    let mut bar = Bar::new("dequantize", BYTES)?;
    let (out, options) = (&args.target.out, args.target.options());
    let report = rewrite::dequantize(&checkpoint, out, dtype, &options, &mut |p| bar.show(p))?;
    drop(bar);
    args.target.print(&report)
}
