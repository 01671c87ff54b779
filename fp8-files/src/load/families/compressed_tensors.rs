//! compressed-tensors, the format of llm-compressor and of this library's own exports.
//!
//! Groups of layers, each with arguments for weights and for inputs; `input_activations: null` is weight-only. Read
//! here are the formats whose weights are E4M3 codes: `float-quantized`, `naive-quantized`, `mxfp8-quantized` and
//! mixtures of them.

use super::fp8::{block_sizes, size};
use crate::error::{Error, Result};
use crate::load::family::{At, Family};
use crate::load::family_name::FamilyName;
use crate::load::targets::{Rank, Targets};
use crate::scheme::{InputScheme, LayerScheme};
use fp8_core::{Granularity, MX_BLOCK};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Formats whose weights are E4M3 codes.
const FORMATS: [&str; 3] = ["float-quantized", "naive-quantized", "mxfp8-quantized"];

#[derive(Debug)]
pub(in crate::load) struct CompressedTensors {
    path: PathBuf,
    groups: Vec<Group>,
    ignored: Targets,
}

#[derive(Debug)]
struct Group {
    /// Where it stands.
    key: String,
    targets: Targets,
    scheme: LayerScheme,
}

impl CompressedTensors {
    pub(in crate::load) fn parse(at: &At<'_>) -> Result<Self> {
        let formats = FORMATS.map(|format| json!(format));
        let of_group = [&formats[..], &[Value::Null]].concat();
        let of_all = [&of_group[..], &[json!("mixed-precision")]].concat();
        at.get("format").must_be(&of_all)?;
        let status = at.get("quantization_status");
        // Early files of llm-compressor have compressed weights and say "frozen".
        status.must_be(&[Value::Null, json!("compressed"), json!("frozen")])?;
        check_cache(&at.get("kv_cache_scheme"))?;
        check_none(&at.get("transform_config"), "config_groups")?;
        check_none(&at.get("sparsity_config"), "format")?;
        let mut groups = vec![];
        for group in at.get("config_groups").entries()? {
            // A group for caches or outputs only says nothing of weights.
            let weights = group.get("weights");
            let targets = group.get("targets");
            let names = targets.texts()?;
            let is_attention =
                !names.is_empty() && names.iter().all(|name| name.ends_with("Attention"));
            if weights.is_null() || is_attention {
                continue;
            }
            group.get("format").must_be(&of_group)?;
            groups.push(Group {
                key: group.key().to_string(),
                targets: Targets::parse(&targets)?,
                scheme: LayerScheme::new(
                    weight_granularity(&weights)?,
                    input_scheme(&group.get("input_activations"))?,
                ),
            });
        }
        Ok(Self {
            path: at.file(),
            groups,
            ignored: Targets::parse(&at.get("ignore"))?,
        })
    }
}

impl Family for CompressedTensors {
    fn name(&self) -> FamilyName {
        FamilyName::CompressedTensors
    }

    fn layer(&self, path: &str) -> Result<Option<LayerScheme>> {
        if self.ignored.rank(path)?.is_some() {
            return Ok(None);
        }
        let mut ranked: Vec<(Rank, &Group)> = vec![];
        for group in &self.groups {
            if let Some(rank) = group.targets.rank(path)? {
                ranked.push((rank, group));
            }
        }
        let Some(best) = ranked.iter().map(|(rank, _)| *rank).max() else {
            return Ok(None);
        };
        let mut groups = ranked
            .iter()
            .filter(|(rank, _)| *rank == best)
            .map(|(_, group)| group);
        let Some(first) = groups.next() else {
            return Ok(None);
        };
        // The first in the file would count, but the order of a map is not kept here.
        match groups.find(|other| other.scheme != first.scheme) {
            None => Ok(Some(first.scheme)),
            Some(other) => Err(Error::Ambiguous {
                path: self.path.clone(),
                tensor: path.to_string(),
                first: first.key.clone(),
                second: other.key.clone(),
            }),
        }
    }

    fn source(&self) -> Option<&Path> {
        Some(&self.path)
    }
}

/// Scales of caches are told apart by their names; what they stand for must be FP8.
fn check_cache(at: &At<'_>) -> Result<()> {
    if at.is_null() {
        return Ok(());
    }
    check_type(at)?;
    let strategy = at.get("strategy");
    strategy.must_be(&[Value::Null, json!("tensor"), json!("attn_head")])
}

/// Sparse weights, or ones that were rotated, need more than codes and scales.
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

/// Eight bits of floating point, symmetric: what both kinds of arguments must be.
fn check_type(at: &At<'_>) -> Result<()> {
    at.get("num_bits").must_be(&[json!(8)])?;
    at.get("type").must_be(&[json!("float")])?;
    at.get("symmetric").must_be(&[json!(true), Value::Null])?;
    at.get("actorder").must_be(&[json!(false), Value::Null])
}

/// The strategy, spelled out or told by the group size.
fn strategy<'a>(at: &At<'a>) -> Result<&'a str> {
    let strategy = at.get("strategy");
    if !strategy.is_null() {
        return strategy.text("a name");
    }
    let group = at.get("group_size");
    match group.value {
        Value::Null => Ok("tensor"),
        value if value.as_i64() == Some(-1) => Ok("channel"),
        value if size(value).is_some_and(|size| size > 0) => Ok("group"),
        _ => Err(group.unsupported("null, -1 or a size")),
    }
}

/// Whether scales are bytes that stand for powers of two.
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
    at.get("dynamic").must_be(&[json!(false), Value::Null])?;
    let mx = has_mx_scales(at)?;
    match strategy(at)? {
        "tensor" if !mx => Ok(Granularity::Tensorwise),
        "channel" if !mx => Ok(Granularity::Rowwise),
        "block" if !mx => match block_sizes(&at.get("block_structure"))? {
            Some((rows, cols)) => Ok(Granularity::Blockwise { rows, cols }),
            None => Err(at.get("block_structure").unsupported("[rows, cols]")),
        },
        "group" if mx && size(at.get("group_size").value) == Some(MX_BLOCK) => Ok(Granularity::Mx),
        _ => Err(at.unsupported(EXPECTED)),
    }
}

fn input_scheme(at: &At<'_>) -> Result<InputScheme> {
    const EXPECTED: &str = "null, tensor (static or dynamic), token (dynamic) or group (dynamic)";
    if at.is_null() {
        return Ok(InputScheme::None);
    }
    check_type(at)?;
    let dynamic = match at.get("dynamic").value {
        Value::Bool(dynamic) => *dynamic,
        Value::Null => false,
        _ => return Err(at.get("dynamic").unsupported("true or false")),
    };
    let group = size(at.get("group_size").value).filter(|size| *size > 0);
    let mx = has_mx_scales(at)?;
    match (strategy(at)?, dynamic, group) {
        ("tensor", false, _) if !mx => Ok(InputScheme::Static),
        ("tensor", true, _) if !mx => Ok(InputScheme::PerTensor),
        ("token", true, _) if !mx => Ok(InputScheme::PerToken),
        ("group", true, Some(MX_BLOCK)) if mx => Ok(InputScheme::Mx),
        ("group", true, Some(group)) if !mx => Ok(InputScheme::PerGroup(group)),
        _ => Err(at.unsupported(EXPECTED)),
    }
}
