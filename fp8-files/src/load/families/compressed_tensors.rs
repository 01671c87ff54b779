//! compressed-tensors, the format of llm-compressor and of this library's own exports.
//!
//! Groups of layers, each with arguments for weights and for inputs; `input_activations: null` is weight-only. Formats with E4M3 codes
//! are read: `float-quantized`, `naive-quantized`, `mxfp8-quantized`, and those with E2M1 codes, `mxfp4-pack-quantized` and
//! `nvfp4-pack-quantized`; also mixtures of them.

use crate::error::Result;
use crate::load::at::At;
use crate::load::family::{Declared, Family, Global, agreed};
use crate::load::family_name::FamilyName;
use crate::load::targets::{Rank, Targets};
use crate::scheme::InputScheme;
use fp8_core::{Granularity, MX_BLOCK};
use serde_json::{Value, json};

impl FamilyName {
    /// compressed-tensors, the format of llm-compressor and of this library's own exports.
    pub const COMPRESSED_TENSORS: Self = Self::new("compressed-tensors");
}

/// The scale of inputs in FP4, which stay in high precision here.
const FP4_INPUTS: &str = "input_global_scale";

/// The targets of a group, and its key with what it declares.
type Group = (Targets, (String, Declared));

pub(super) fn parse(at: &At<'_>) -> Result<Family> {
    at.get("format").must_be(json!([
        "float-quantized",
        "naive-quantized",
        "mxfp8-quantized",
        "mxfp4-pack-quantized",
        "nvfp4-pack-quantized",
        null,
        "mixed-precision"
    ]))?;
    // Early files of llm-compressor have compressed weights and say "frozen".
    at.get("quantization_status")
        .must_be(json!([null, "compressed", "frozen"]))?;
    check_cache(&at.get("kv_cache_scheme"))?;
    check_none(&at.get("transform_config"), "config_groups")?;
    check_none(&at.get("sparsity_config"), "format")?;
    let mut groups: Vec<Group> = vec![];
    for (_, group) in at.get("config_groups").entries()? {
        // A group for caches or outputs alone declares no weights.
        let weights = group.get("weights");
        let targets = group.get("targets");
        let names = targets.texts()?;
        let is_attention =
            !names.is_empty() && names.iter().all(|name| name.ends_with("Attention"));
        if weights.is_null() || is_attention {
            continue;
        }
        group.get("format").must_be(json!([
            "float-quantized",
            "naive-quantized",
            "mxfp8-quantized",
            "mxfp4-pack-quantized",
            "nvfp4-pack-quantized",
            null
        ]))?;
        let targets = Targets::parse(&targets)?;
        let input = input_scheme(&group.get("input_activations"))?;
        let declared = match weights.get("num_bits").size() {
            Some(4) => fp4(&weights, input)?,
            _ => Declared::new(weight_granularity(&weights)?, input),
        };
        groups.push((targets, (group.key, declared)));
    }
    let ignored = Targets::parse(&at.get("ignore"))?;
    let source = at.path.to_path_buf();
    let layer = move |path: &str| {
        if ignored.rank(path)?.is_some() {
            return Ok(None);
        }
        let mut ranked: Vec<(Rank, &(String, Declared))> = vec![];
        for (targets, entry) in &groups {
            ranked.extend(targets.rank(path)?.map(|rank| (rank, entry)));
        }
        let best = ranked.iter().map(|(rank, _)| *rank).max();
        let best = ranked.iter().filter(|(rank, _)| Some(*rank) == best);
        agreed(&source, path, best.map(|(_, entry)| *entry))
    };
    Ok(Family {
        packed_weights: &["weight_packed"],
        global_scales: &[("weight_global_scale", Global::Divides)],
        descriptions: &[FP4_INPUTS],
        ..Family::new(FamilyName::COMPRESSED_TENSORS, Some(at.path), layer)
    })
}

/// Checks that a cache is FP8. Its scales are recognized by their names.
fn check_cache(at: &At<'_>) -> Result<()> {
    if at.is_null() {
        return Ok(());
    }
    check_type(at)?;
    at.get("strategy")
        .must_be(json!([null, "tensor", "attn_head"]))
}

/// Sparse or rotated weights need more than codes and scales.
fn check_none(at: &At<'_>, key: &str) -> Result<()> {
    let inner = at.get(key);
    let is_empty = match inner.value {
        Value::Null => true,
        Value::Object(map) => map.is_empty(),
        value => value == "dense",
    };
    match is_empty {
        true => Ok(()),
        false => Err(inner.unsupported("none")),
    }
}

/// Checks the arguments of weights or inputs: eight bits of floating point, symmetric.
fn check_type(at: &At<'_>) -> Result<()> {
    at.get("num_bits").must_be(json!([8]))?;
    check_symmetric_float(at)
}

fn check_symmetric_float(at: &At<'_>) -> Result<()> {
    at.get("type").must_be(json!(["float"]))?;
    at.get("symmetric").must_be(json!([true, null]))?;
    at.get("actorder").must_be(json!([false, null]))
}

/// The strategy by name, or derived from the group size.
fn strategy<'a>(at: &At<'a>) -> Result<&'a str> {
    let strategy = at.get("strategy");
    if !strategy.is_null() {
        return strategy.text("a name");
    }
    let group = at.get("group_size");
    match group.value {
        Value::Null => Ok("tensor"),
        value if value.as_i64() == Some(-1) => Ok("channel"),
        _ if group.size().is_some_and(|size| size > 0) => Ok("group"),
        _ => Err(group.unsupported("null, -1 or a size")),
    }
}

/// Whether scales are bytes that encode powers of two.
fn has_mx_scales(at: &At<'_>) -> Result<bool> {
    let dtype = at.get("scale_dtype");
    match dtype.value.as_str() {
        None if dtype.is_null() => Ok(false),
        Some("torch.uint8" | "uint8" | "torch.float8_e8m0fnu" | "float8_e8m0fnu") => Ok(true),
        Some(name) if !name.contains("int") => Ok(false),
        _ => Err(dtype.unsupported("a floating point dtype or torch.uint8")),
    }
}

fn weight_granularity(at: &At<'_>) -> Result<Granularity> {
    const EXPECTED: &str = "tensor, channel, block or group (of 32, with scales in torch.uint8)";
    check_type(at)?;
    at.get("dynamic").must_be(json!([false, null]))?;
    let mx = has_mx_scales(at)?;
    match strategy(at)? {
        "tensor" if !mx => Ok(Granularity::Tensorwise),
        "channel" if !mx => Ok(Granularity::Rowwise),
        "block" if !mx => at.get("block_structure").blocks(),
        "group" if mx && at.get("group_size").size() == Some(MX_BLOCK) => Ok(Granularity::Mx),
        _ => Err(at.unsupported(EXPECTED)),
    }
}

/// Weights of E2M1 codes: groups of 32 with scales as bytes (MXFP4), or of 16 with scales in FP8 (NVFP4).
fn fp4(at: &At<'_>, input: InputScheme) -> Result<Declared> {
    const EXPECTED: &str = "for 4 bits group of 32 (scales in torch.uint8) or tensor_group of 16 (scales in torch.float8_e4m3fn)";
    check_symmetric_float(at)?;
    at.get("dynamic").must_be(json!([false, null]))?;
    let strategy = at.get("strategy");
    let scales = at.get("scale_dtype");
    let is_e4m3 = matches!(
        scales.value.as_str(),
        Some("torch.float8_e4m3fn" | "float8_e4m3fn")
    );
    match (strategy.value.as_str(), at.get("group_size").size()) {
        (Some("group") | None, Some(MX_BLOCK)) if scales.is_null() || has_mx_scales(at)? => {
            Ok(Declared::mxfp4(input))
        }
        (Some("tensor_group"), Some(16)) if scales.is_null() || is_e4m3 => {
            Ok(Declared::nvfp4(input))
        }
        _ => Err(at.unsupported(EXPECTED)),
    }
}

/// How inputs are scaled. Inputs in FP4 stay in high precision, as on processors without products in FP4.
fn input_scheme(at: &At<'_>) -> Result<InputScheme> {
    const EXPECTED: &str = "null, tensor (static or dynamic), token (dynamic) or group (dynamic)";
    if at.is_null() {
        return Ok(InputScheme::None);
    }
    if at.get("num_bits").size() == Some(4) {
        check_symmetric_float(at)?;
        return Ok(InputScheme::None);
    }
    check_type(at)?;
    let dynamic = match at.get("dynamic").value {
        Value::Bool(dynamic) => *dynamic,
        Value::Null => false,
        _ => return Err(at.get("dynamic").unsupported("true or false")),
    };
    let mx = has_mx_scales(at)?;
    match input_by_strategy(strategy(at)?, dynamic, &at.get("group_size"), mx) {
        Some(scheme) if mx == (scheme == InputScheme::DynamicMx) => Ok(scheme),
        _ => Err(at.unsupported(EXPECTED)),
    }
}

/// The scheme of inputs with this strategy; None for an unknown combination.
pub(super) fn input_by_strategy(
    strategy: &str,
    dynamic: bool,
    group_size: &At<'_>,
    powers_of_two: bool,
) -> Option<InputScheme> {
    match (strategy, dynamic, group_size.size()) {
        ("tensor", false, _) => Some(InputScheme::Static(())),
        ("tensor", true, _) => Some(InputScheme::per_tensor()),
        ("token", true, _) => Some(InputScheme::per_token()),
        ("group", true, Some(MX_BLOCK)) if powers_of_two => Some(InputScheme::DynamicMx),
        ("group", true, Some(size)) if size > 0 => Some(InputScheme::per_group(size)),
        _ => None,
    }
}
