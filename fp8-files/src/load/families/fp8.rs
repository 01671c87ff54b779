//! `quant_method: "fp8"`: one scale per weight (AutoFP8, vLLM, and Mistral's files for transformers) or blocks (DeepSeek, Qwen), with
//! experts in MXFP4 (DeepSeek-V4).

use super::modules::Modules;
use crate::error::Result;
use crate::load::at::At;
use crate::load::family::{Declared, Family};
use crate::load::family_name::FamilyName;
use crate::safetensors_file::{SafetensorsFile, any_name};
use crate::scheme::InputScheme;
use fp8_core::{Granularity, MX_BLOCK};
use safetensors::Dtype;
use serde_json::{Value, json};

impl FamilyName {
    /// One scale per weight, `weight_scale`: AutoFP8, vLLM, Intel.
    pub const AUTO_FP8: Self = Self::new("fp8 (AutoFP8, vLLM)");

    /// One scale per block, `weight_scale_inv` or `scale`.
    pub const FP8_BLOCKS: Self = Self::new("fp8 blocks (DeepSeek, Qwen)");

    /// One scale per weight, `weight_scale_inv`: Mistral's files for transformers.
    pub const HF_PER_TENSOR: Self = Self::new("fp8 per tensor (Mistral for transformers)");
}

/// In the paths of the experts that a router chooses.
const EXPERTS: &str = ".experts.";

/// Whether the experts are in FP4, as in DeepSeek-V4. `expert_dtype` may be outside of the quantization's entries, so where it is not
/// among them the dtypes of the experts decide.
fn fp4_experts(at: &At<'_>, files: &[&SafetensorsFile]) -> Result<bool> {
    let told = at.get("expert_dtype");
    told.must_be(json!([null, "fp8", "float8_e4m3fn", "fp4"]))?;
    if !told.is_null() {
        return Ok(told.value == "fp4");
    }
    let is_packed = |file: &&SafetensorsFile| {
        file.names().any(|name| {
            name.contains(EXPERTS)
                && name.ends_with(".weight")
                && matches!(file.dtype(&name), Some(Dtype::I8 | Dtype::U8))
        })
    };
    Ok(files.iter().any(is_packed))
}

/// All layers but FP4 experts are stored alike. The scales in the file show which layers are FP8; the configuration lists those that are not.
pub(super) fn parse(at: &At<'_>, files: &[&SafetensorsFile]) -> Result<Family> {
    let inverse = any_name(files, |name| name.ends_with(".weight_scale_inv"));
    at.get("fmt")
        .must_be(json!([null, "e4m3", "float8_e4m3fn"]))?;
    let experts = fp4_experts(at, files)?;
    let scale_fmt = at.get("scale_fmt");
    scale_fmt.must_be(json!([null, "float", "fp32", "ue8m0"]))?;
    let block = at.get("weight_block_size");
    let activation = at.get("activation_scheme");
    let is_mx = at.get("quant_method").value == "mxfp8";
    let kind = match activation.value {
        Value::Null if is_mx => "dynamic",
        _ => activation.text("\"static\" or \"dynamic\"")?,
    };
    let declared = match (block.block_sizes()?, kind) {
        (None | Some((1, MX_BLOCK)), "dynamic") if is_mx => {
            Declared::new(Granularity::Mx, InputScheme::DynamicMx)
        }
        (_, "dynamic") if is_mx => return Err(block.unsupported("[1, 32] for mxfp8")),
        (None, "static") => Declared::new(None, InputScheme::Static(())),
        (None, "dynamic") => Declared::new(None, InputScheme::per_token()),
        (Some((rows, cols)), "dynamic") => Declared::new(
            Granularity::Blockwise { rows, cols },
            InputScheme::per_group(cols).with_power_of_two(scale_fmt.value == "ue8m0"),
        ),
        (None, _) => return Err(activation.unsupported("\"static\" or \"dynamic\"")),
        (Some(_), _) => return Err(activation.unsupported("\"dynamic\" for blocks")),
    };
    let name = match (declared.weight, inverse) {
        (Some(_), _) => FamilyName::FP8_BLOCKS,
        (None, true) => FamilyName::HF_PER_TENSOR,
        (None, false) => FamilyName::AUTO_FP8,
    };
    let modules = Modules::lenient(at, &["ignored_layers", "modules_to_not_convert"])?;
    let layer = move |path: &str| {
        let declared = match path.contains(EXPERTS) && experts {
            true => Declared::mxfp4(declared.input.unwrap_or(InputScheme::None)),
            false => declared,
        };
        Ok((!modules.name(path)).then_some(declared))
    };
    Ok(Family {
        packed_weights: if experts { &["weight"] } else { &[] },
        weight_scales: match name {
            FamilyName::FP8_BLOCKS => &["weight_scale_inv", "weight_scale", "scale"],
            FamilyName::HF_PER_TENSOR => &["weight_scale_inv", "weight_scale"],
            _ => &["weight_scale", "weight_scale_inv"],
        },
        input_scales: match name {
            FamilyName::HF_PER_TENSOR => &["activation_scale", "input_scale", "act_scale"],
            _ => &["input_scale", "activation_scale", "act_scale"],
        },
        ..Family::new(name, Some(at.path), layer)
    })
}
