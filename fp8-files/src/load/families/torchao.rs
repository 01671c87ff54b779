//! torchao, as safetensors: the metadata of a file describes its tensors.

use crate::error::{Error, Result};
use crate::load::at::At;
use crate::load::family::{Declared, Family, Order};
use crate::load::family_name::FamilyName;
use crate::names::{join, split, weight_name};
use crate::safetensors_file::SafetensorsFile;
use crate::scheme::InputScheme;
use fp8_core::{Granularity, MX_BLOCK};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

impl FamilyName {
    /// torchao, described in the metadata of the files.
    pub const TORCHAO: Self = Self::new("torchao");
}

/// Metadata entry with the names of the tensors that torchao wrote.
const NAMES: &str = "tensor_names";

/// Whether torchao wrote any of the files.
pub(in crate::load) fn is_torchao(files: &[&SafetensorsFile]) -> bool {
    files.iter().any(|file| file.metadata(NAMES).is_some())
}

pub(in crate::load) fn parse(at: Option<&At<'_>>, files: &[&SafetensorsFile]) -> Result<Family> {
    if let Some(at) = at {
        check_config(at)?;
    }
    let first = files
        .first()
        .map(|file| file.path())
        .unwrap_or(Path::new(""));
    if !is_torchao(files) {
        return Err(Error::NotSafetensors {
            path: first.to_path_buf(),
            reason: "torchao's metadata entry `tensor_names` is missing, which says what its tensors are".into(),
        });
    }
    // FP8 weights by the names of the parameters.
    let mut weights = BTreeMap::new();
    for file in files {
        for (name, text) in file.all_metadata() {
            if !text.starts_with('{') {
                continue;
            }
            let what = "torchao's description of a tensor";
            let value: Value = serde_json::from_str(text)
                .map_err(|error| Error::json(file.path(), what, format!("`{name}`: {error}")))?;
            let at = At::new(file.path(), name, &value);
            let mut declared = match at.get("_type").text("the type of a tensor")? {
                "Tensor" => continue,
                "Float8Tensor" => float8(&at.get("_data"))?,
                "MXTensor" => mx(&at.get("_data"))?,
                _ => {
                    return Err(at
                        .get("_type")
                        .unsupported("Tensor, Float8Tensor or MXTensor"));
                }
            };
            let (path, own) = split(name);
            let codes = join(path, &format!("_{own}_qdata"));
            let Some(shape) = files.iter().find_map(|file| file.shape(&codes)) else {
                let file = file.path().display();
                return Err(Error::MissingTensor {
                    tensor: codes,
                    place: format!("{file}, whose metadata describe `{name}`,"),
                });
            };
            declared.weight = declared.weight.map(|weight| named(weight, shape));
            weights.insert(name.clone(), declared);
        }
    }
    let layer = move |path: &str| Ok(weights.get(&weight_name(path)).copied());
    let source = at.map_or(first, |at| at.path);
    Ok(Family {
        rename: Box::new(rename),
        ..Family::new(FamilyName::TORCHAO, Some(source), layer)
    })
}

/// `M._weight_qdata` and `M._weight_scale` are the parts of `M.weight`.
fn rename(name: &str) -> (String, Order) {
    let (path, own) = split(name);
    let part = |end: &str| own.strip_prefix('_')?.strip_suffix(end);
    let own = match (part("_qdata"), part("_scale")) {
        (Some(own), _) => own.to_string(),
        (_, Some(own)) => format!("{own}_scale"),
        _ => own.to_string(),
    };
    (join(path, &own), Order::AsStored)
}

/// Checks the kind of the configuration; the metadata have everything else.
fn check_config(at: &At<'_>) -> Result<()> {
    const EXPECTED: &str = "Float8DynamicActivationFloat8WeightConfig, Float8WeightOnlyConfig, FqnToConfig or an MX config";
    let of_type = at.get("quant_type").get("default").get("_type");
    let is_known = |name: &str| {
        name.contains("Float8") || name.contains("FqnToConfig") || name.starts_with("MX")
    };
    match of_type.value.as_str() {
        Some(name) if !is_known(name) => Err(of_type.unsupported(EXPECTED)),
        _ => Ok(()),
    }
}

/// Checks that a dtype, a text or an object, is E4M3.
fn check_dtype(at: &At<'_>) -> Result<()> {
    let inner = at.get("_data");
    let at = if inner.is_null() { at } else { &inner };
    at.must_be(json!([null, "float8_e4m3fn", "torch.float8_e4m3fn"]))
}

/// Weights in blocks, which may be rows or the whole matrix, and inputs cast as `act_quant_kwargs` says.
fn float8(at: &At<'_>) -> Result<Declared> {
    let granularity = at.get("block_size").blocks()?;
    let inputs = at.get("act_quant_kwargs");
    if inputs.is_null() {
        return Ok(Declared::new(granularity, InputScheme::None));
    }
    let inputs = inputs.get("_data");
    check_dtype(&inputs.get("float8_dtype"))?;
    inputs.get("hp_value_lb").must_be(json!([null]))?;
    let bound = inputs.get("hp_value_ub");
    let of_inputs = inputs.get("granularity");
    let (power_of_two, data) = (false, of_inputs.get("_data"));
    let input = match of_inputs
        .get("_type")
        .text("PerRow, PerTensor or PerBlock")?
    {
        "PerRow" => {
            data.get("dim").must_be(json!([null, -1]))?;
            InputScheme::DynamicPerToken {
                power_of_two,
                amax_bound: bound.positive()?,
            }
        }
        "PerTensor" => InputScheme::DynamicPerTensor {
            power_of_two,
            amax_bound: bound.positive()?,
        },
        "PerBlock" => {
            let block = data.get("block_size");
            match block.block_sizes()? {
                Some((1, _)) if !bound.is_null() => {
                    return Err(bound.unsupported("null for blocks"));
                }
                Some((1, size)) => InputScheme::per_group(size),
                _ => return Err(block.unsupported("[1, size]")),
            }
        }
        _ => return Err(of_inputs.unsupported("PerRow, PerTensor or PerBlock")),
    };
    Ok(Declared::new(granularity, input))
}

/// The name of blocks that are whole rows or the whole matrix.
fn named(weight: Granularity, shape: &[usize]) -> Granularity {
    match (weight, shape) {
        (Granularity::Blockwise { rows, cols }, [n, k]) if (rows, cols) == (*n, *k) => {
            Granularity::Tensorwise
        }
        (Granularity::Blockwise { rows: 1, cols }, [_, k]) if cols == *k => Granularity::Rowwise,
        _ => weight,
    }
}

fn mx(at: &At<'_>) -> Result<Declared> {
    check_dtype(&at.get("elem_dtype"))?;
    at.get("block_size").must_be(json!([MX_BLOCK]))?;
    at.get("is_swizzled_scales").must_be(json!([null, false]))?;
    let input = match at.get("act_quant_kwargs").is_null() {
        true => InputScheme::None,
        false => InputScheme::DynamicMx,
    };
    Ok(Declared::new(Granularity::Mx, input))
}
