//! `quant_method: "fp8"`: the files of vLLM and AutoFP8 (one scale per weight) and of DeepSeek and Qwen (blocks).

use super::family::{At, Family};
use super::scheme::{InputScheme, LayerScheme};
use crate::error::Result;
use fp8_core::Granularity;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// All layers are stored alike; which ones are FP8 the file says by their scales.
#[derive(Debug)]
pub(super) struct Fp8 {
    path: PathBuf,
    scheme: LayerScheme,
}

impl Fp8 {
    pub(super) fn parse(at: &At<'_>) -> Result<Self> {
        at.get("fmt").must_be(&[Value::Null, json!("e4m3")])?;
        // Power-of-two scales of inputs are a scheme of their own.
        at.get("scale_fmt")
            .must_be(&[Value::Null, json!("float"), json!("fp32")])?;
        let block = at.get("weight_block_size");
        let activation = at.get("activation_scheme");
        let name = activation.text("\"static\" or \"dynamic\"")?;
        let scheme = match (block_sizes(&block)?, name) {
            (None, "static") => LayerScheme {
                weight: None,
                input: Some(InputScheme::Static),
                power_of_two_inputs: false,
            },
            (None, "dynamic") => LayerScheme {
                weight: None,
                input: Some(InputScheme::PerToken),
                power_of_two_inputs: false,
            },
            (Some((rows, cols)), "dynamic") => LayerScheme {
                weight: Some(Granularity::Blockwise { rows, cols }),
                input: Some(InputScheme::PerGroup(cols)),
                power_of_two_inputs: false,
            },
            (None, _) => return Err(activation.unsupported("\"static\" or \"dynamic\"")),
            (Some(_), _) => return Err(activation.unsupported("\"dynamic\" for blocks")),
        };
        Ok(Self {
            path: at.file(),
            scheme,
        })
    }
}

/// `[rows, cols]`; None of null.
pub(super) fn block_sizes(at: &At<'_>) -> Result<Option<(usize, usize)>> {
    const EXPECTED: &str = "null or [rows, cols]";
    if at.is_null() {
        return Ok(None);
    }
    let sizes: Option<Vec<usize>> = match at.value {
        Value::Array(sizes) => sizes.iter().map(size).collect(),
        // As old files of compressed-tensors spell it.
        Value::String(text) => text.split('x').map(|size| size.parse().ok()).collect(),
        _ => None,
    };
    match sizes.as_deref() {
        Some(&[rows, cols]) if rows > 0 && cols > 0 => Ok(Some((rows, cols))),
        _ => Err(at.unsupported(EXPECTED)),
    }
}

/// A size that a tensor may have.
pub(super) fn size(value: &Value) -> Option<usize> {
    let size = u32::try_from(value.as_u64()?).ok()?;
    Some(size as usize)
}

impl Family for Fp8 {
    fn layer(&self, _: &str) -> Result<Option<LayerScheme>> {
        Ok(Some(self.scheme))
    }

    fn weight_scale_names(&self) -> &'static [&'static str] {
        &["weight_scale_inv", "weight_scale"]
    }

    fn input_scale_names(&self) -> &'static [&'static str] {
        &["input_scale", "activation_scale", "act_scale"]
    }

    fn source(&self) -> Option<&Path> {
        Some(&self.path)
    }
}
