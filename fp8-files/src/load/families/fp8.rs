//! `quant_method: "fp8"`: one scale per weight (AutoFP8, vLLM, and Mistral's files for transformers) or blocks (DeepSeek, Qwen).

use super::modules::Modules;
use crate::error::Result;
use crate::load::family::{At, Family};
use crate::load::family_name::FamilyName;
use crate::scheme::{InputScheme, LayerScheme};
use fp8_core::{Granularity, MX_BLOCK};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// All layers are stored alike; which ones are FP8 the file says by their scales, and the configuration which ones are not.
#[derive(Debug)]
pub(in crate::load) struct Fp8 {
    path: PathBuf,
    name: FamilyName,
    scheme: LayerScheme,
    /// Layers in high precision.
    modules: Modules,
}

impl Fp8 {
    /// `inverse`: whether the file calls its scales `weight_scale_inv`.
    pub(in crate::load) fn parse(at: &At<'_>, inverse: bool) -> Result<Self> {
        at.get("fmt")
            .must_be(&[Value::Null, json!("e4m3"), json!("float8_e4m3fn")])?;
        at.get("expert_dtype")
            .must_be(&[Value::Null, json!("fp8"), json!("float8_e4m3fn")])?;
        let scale_fmt = at.get("scale_fmt");
        scale_fmt.must_be(&[Value::Null, json!("float"), json!("fp32"), json!("ue8m0")])?;
        let block = at.get("weight_block_size");
        let activation = at.get("activation_scheme");
        let is_mx = at.get("quant_method").value == "mxfp8";
        let kind = match activation.value {
            Value::Null if is_mx => "dynamic",
            _ => activation.text("\"static\" or \"dynamic\"")?,
        };
        let scheme = match (block_sizes(&block)?, kind) {
            (None | Some((1, MX_BLOCK)), "dynamic") if is_mx => {
                LayerScheme::new(Granularity::Mx, InputScheme::Mx)
            }
            (_, "dynamic") if is_mx => return Err(block.unsupported("[1, 32] for mxfp8")),
            (None, "static") => LayerScheme {
                input: Some(InputScheme::Static),
                ..LayerScheme::default()
            },
            (None, "dynamic") => LayerScheme {
                input: Some(InputScheme::PerToken),
                ..LayerScheme::default()
            },
            (Some((rows, cols)), "dynamic") => LayerScheme {
                power_of_two_inputs: scale_fmt.value == "ue8m0",
                ..LayerScheme::new(
                    Granularity::Blockwise { rows, cols },
                    InputScheme::PerGroup(cols),
                )
            },
            (None, _) => return Err(activation.unsupported("\"static\" or \"dynamic\"")),
            (Some(_), _) => return Err(activation.unsupported("\"dynamic\" for blocks")),
        };
        let mut modules = Modules::default();
        for key in ["ignored_layers", "modules_to_not_convert"] {
            modules.add_lenient(&at.get(key))?;
        }
        Ok(Self {
            path: at.file(),
            name: match (scheme.weight, inverse) {
                (Some(_), _) => FamilyName::Fp8Blocks,
                (None, true) => FamilyName::HfPerTensor,
                (None, false) => FamilyName::AutoFp8,
            },
            scheme,
            modules,
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
    fn name(&self) -> FamilyName {
        self.name
    }

    fn layer(&self, path: &str) -> Result<Option<LayerScheme>> {
        Ok((!self.modules.name(path)).then_some(self.scheme))
    }

    fn weight_scale_names(&self) -> &'static [&'static str] {
        match self.name {
            FamilyName::Fp8Blocks => &["weight_scale_inv", "weight_scale", "scale"],
            FamilyName::HfPerTensor => &["weight_scale_inv", "weight_scale"],
            _ => &["weight_scale", "weight_scale_inv"],
        }
    }

    fn input_scale_names(&self) -> &'static [&'static str] {
        match self.name {
            FamilyName::HfPerTensor => &["activation_scale", "input_scale", "act_scale"],
            _ => &["input_scale", "activation_scale", "act_scale"],
        }
    }

    fn source(&self) -> Option<&Path> {
        Some(&self.path)
    }
}
