//! `fp8 logits`: the logits of token ids, or the features of an encoder, to compare with another framework.

use crate::model::Source;
use crate::output::{print, separate};
use anyhow::{Context, Result, bail};
use candle_core::{DType, Device};
use fp8::models::{Model, TextError};
use std::collections::BTreeMap;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: Source,
    /// A safetensors file with `input_ids`, [batch, tokens] of any integers; for an encoder perhaps with `attention_mask`. `token_type_ids` may
    /// only be 0, and the mask of a language model only 1
    #[arg(long, value_name = "FILE")]
    ids: PathBuf,
    /// The safetensors file to write: `logits`, [batch, tokens, vocabulary] in f32; of a classifier [batch, classes]; of an encoder
    /// `features`, [batch, tokens, features]
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

pub fn run(args: &Args) -> Result<()> {
    separate(&args.out, args.source.paths().chain([args.ids.as_path()]))?;
    let file = || args.ids.display().to_string();
    let tensors = candle_core::safetensors::load(&args.ids, &Device::Cpu).with_context(file)?;
    let Some(ids) = tensors.get("input_ids") else {
        bail!("{} has no tensor `input_ids`", file());
    };
    let (model, _) = args.source.load()?;
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
    let only = |name: &str, value: f32, why: &str| -> Result<()> {
        let Some(tensor) = tensors.get(name) else {
            return Ok(());
        };
        let values = tensor.to_dtype(DType::F32)?.flatten_all()?;
        match values.to_vec1::<f32>()?.into_iter().find(|x| *x != value) {
            None => Ok(()),
            Some(other) => bail!("{}: {name} has {other}: {why}", file()),
        }
    };
    only(
        "token_type_ids",
        0.,
        "every token is of the first segment here, with the number 0",
    )?;
    if !matches!(model, Model::Bert(_)) {
        let why = "a language model reads all tokens of a row: leave out padding";
        only("attention_mask", 1., why)?;
    }
    // All rows at once: a scale of the whole batch is one of the whole batch.
    let (name, result) = match &model {
        Model::Bert(model) => {
            let mask = match tensors.get("attention_mask") {
                Some(mask) => mask.to_dtype(DType::U32)?,
                None => ids.ones_like()?,
            };
            match model.labels().is_empty() {
                true => ("features", model.forward(ids, &mask)),
                false => ("logits", model.classify(ids, &mask)),
            }
        }
        model => ("logits", model.forward(ids)),
    };
    let logits = result.with_context(file)?.to_dtype(DType::F32)?;
    let shape = logits.dims().to_vec();
    let tensors = BTreeMap::from([(name.to_string(), logits)]);
    fp8::atomic::write_safetensors_atomic(&args.out, &tensors, None)?;
    print(&format!("{}: {name} {shape:?}\n", args.out.display()))
}
