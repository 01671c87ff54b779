//! `fp8 logits`: the logits of token ids, to compare with another framework.

use crate::model::Source;
use crate::output::print;
use anyhow::{Context, Result, bail};
use candle_core::{DType, Device};
use fp8::models::{CausalLm, TextError};
use std::collections::BTreeMap;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: Source,
    /// A safetensors file with `input_ids`, [batch, tokens] of any integers
    #[arg(long, value_name = "FILE")]
    ids: PathBuf,
    /// The safetensors file to write: `logits`, [batch, tokens, vocabulary] in f32
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

pub fn run(args: &Args) -> Result<()> {
    let file = || args.ids.display().to_string();
    let tensors = candle_core::safetensors::load(&args.ids, &Device::Cpu).with_context(file)?;
    let Some(ids) = tensors.get("input_ids") else {
        bail!("{} has no tensor `input_ids`", file());
    };
    let (model, _) = args.source.load_llama()?;
    if let (Ok(tokens), Some(positions)) = (ids.dim(1), model.max_positions())
        && tokens > positions
    {
        let prompt = 0;
        let error = TextError::TooManyTokens {
            prompt,
            tokens,
            positions,
        };
        return Err(error).with_context(file);
    }
    // All rows at once: a scale of the whole batch is one of the whole batch.
    let logits = model
        .forward(ids)
        .with_context(file)?
        .to_dtype(DType::F32)?;
    let shape = logits.dims().to_vec();
    let tensors = BTreeMap::from([("logits".to_string(), logits)]);
    fp8::atomic::write_safetensors_atomic(&args.out, &tensors, None)?;
    print(&format!("{}: logits {shape:?}\n", args.out.display()))
}
