//! torchao, as safetensors: what a tensor is stands in the metadata of its file.

use crate::error::{Error, Result};
use crate::load::family::{At, Family, Order};
use crate::load::family_name::FamilyName;
use crate::names::{join, split};
use crate::safetensors_file::SafetensorsFile;
use crate::scheme::{InputScheme, LayerScheme};
use fp8_core::{Granularity, MX_BLOCK};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Lists the tensors of a file that torchao has written.
const NAMES: &str = "tensor_names";

#[derive(Debug)]
pub(in crate::load) struct Torchao {
    path: PathBuf,
    /// FP8 weights by the names of the parameters.
    weights: BTreeMap<String, LayerScheme>,
}

/// Whether torchao has written any of the files.
pub(in crate::load) fn is_torchao(files: &[&SafetensorsFile]) -> bool {
    files.iter().any(|file| file.metadata(NAMES).is_some())
}

impl Torchao {
    pub(in crate::load) fn parse(at: Option<&At<'_>>, files: &[&SafetensorsFile]) -> Result<Self> {
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
        let mut weights = BTreeMap::new();
        for file in files {
            for (name, text) in file.all_metadata() {
                if !text.starts_with('{') {
                    continue;
                }
                let value: Value = serde_json::from_str(text).map_err(|error| Error::Json {
                    path: file.path().to_path_buf(),
                    what: "torchao's description of a tensor",
                    reason: format!("`{name}`: {error}"),
                })?;
                let at = At::new(file.path(), name, &value);
                let scheme = match at.get("_type").text("the type of a tensor")? {
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
                let shape = files.iter().find_map(|file| file.shape(&codes));
                let scheme = named(scheme, shape.unwrap_or_default());
                if shape.is_none() {
                    return Err(Error::MissingTensor {
                        tensor: codes,
                        place: format!(
                            "{}, whose metadata describe `{name}`,",
                            file.path().display()
                        ),
                    });
                }
                weights.insert(name.clone(), scheme);
            }
        }
        Ok(Self {
            path: at.map_or_else(|| first.to_path_buf(), At::file),
            weights,
        })
    }
}

/// Of the configuration only the kind counts.
fn check_config(at: &At<'_>) -> Result<()> {
    const EXPECTED: &str = "Float8DynamicActivationFloat8WeightConfig, Float8WeightOnlyConfig, FqnToConfig or an MX config";
    let of_type = at.get("quant_type").get("default").get("_type");
    match of_type.value.as_str() {
        None => Ok(()),
        Some(name)
            if name.contains("Float8")
                || name.contains("FqnToConfig")
                || name.starts_with("MX") =>
        {
            Ok(())
        }
        Some(_) => Err(of_type.unsupported(EXPECTED)),
    }
}

/// The name of a dtype, as text or in an object.
fn dtype(at: &At<'_>) -> Result<()> {
    let inner = at.get("_data");
    let at = if inner.is_null() { at } else { &inner };
    at.must_be(&[
        Value::Null,
        json!("float8_e4m3fn"),
        json!("torch.float8_e4m3fn"),
    ])
}

fn sizes(at: &At<'_>) -> Result<Vec<i64>> {
    let sizes: Option<Vec<i64>> = match at.value {
        Value::Array(sizes) => sizes.iter().map(Value::as_i64).collect(),
        _ => None,
    };
    sizes
        .filter(|sizes| {
            sizes.len() == 2
                && sizes
                    .iter()
                    .all(|size| *size > 0 && *size <= i64::from(u32::MAX))
        })
        .ok_or_else(|| at.unsupported("[rows, cols]"))
}

/// Weights in blocks, of a row or the whole matrix, and inputs cast as `act_quant_kwargs` says.
fn float8(at: &At<'_>) -> Result<LayerScheme> {
    let sizes = sizes(&at.get("block_size"))?;
    let granularity = Granularity::Blockwise {
        rows: sizes[0] as usize,
        cols: sizes[1] as usize,
    };
    let inputs = at.get("act_quant_kwargs");
    if inputs.is_null() {
        return Ok(LayerScheme::new(granularity, InputScheme::None));
    }
    let inputs = inputs.get("_data");
    dtype(&inputs.get("float8_dtype"))?;
    inputs.get("hp_value_lb").must_be(&[Value::Null])?;
    let of_inputs = inputs.get("granularity");
    let input = match of_inputs
        .get("_type")
        .text("PerRow, PerTensor or PerBlock")?
    {
        "PerRow" => {
            of_inputs
                .get("_data")
                .get("dim")
                .must_be(&[Value::Null, json!(-1)])?;
            InputScheme::PerToken
        }
        "PerTensor" => InputScheme::PerTensor,
        "PerBlock" => {
            let block = of_inputs.get("_data").get("block_size");
            match self::sizes(&block)?.as_slice() {
                [1, size] => InputScheme::PerGroup(*size as usize),
                _ => return Err(block.unsupported("[1, size]")),
            }
        }
        _ => return Err(of_inputs.unsupported("PerRow, PerTensor or PerBlock")),
    };
    let bound = inputs.get("hp_value_ub");
    if !bound.is_null() && !matches!(input, InputScheme::PerToken | InputScheme::PerTensor) {
        return Err(bound.unsupported("null for blocks"));
    }
    Ok(LayerScheme {
        amax_bound: bound.positive()?,
        ..LayerScheme::new(granularity, input)
    })
}

/// A block that is a whole row or the whole matrix goes by that name.
fn named(scheme: LayerScheme, shape: &[usize]) -> LayerScheme {
    let weight = match (scheme.weight, shape) {
        (Some(Granularity::Blockwise { rows, cols }), [n, k]) if (rows, cols) == (*n, *k) => {
            Some(Granularity::Tensorwise)
        }
        (Some(Granularity::Blockwise { rows: 1, cols }), [_, k]) if cols == *k => {
            Some(Granularity::Rowwise)
        }
        (weight, _) => weight,
    };
    LayerScheme { weight, ..scheme }
}

fn mx(at: &At<'_>) -> Result<LayerScheme> {
    dtype(&at.get("elem_dtype"))?;
    at.get("block_size").must_be(&[json!(MX_BLOCK)])?;
    at.get("is_swizzled_scales")
        .must_be(&[Value::Null, json!(false)])?;
    let input = match at.get("act_quant_kwargs").is_null() {
        true => InputScheme::None,
        false => InputScheme::Mx,
    };
    Ok(LayerScheme::new(Granularity::Mx, input))
}

impl Family for Torchao {
    fn name(&self) -> FamilyName {
        FamilyName::Torchao
    }

    fn layer(&self, path: &str) -> Result<Option<LayerScheme>> {
        Ok(self.weights.get(&join(path, "weight")).copied())
    }

    /// `M._weight_qdata` and `M._weight_scale` are the parts of `M.weight`.
    fn rename(&self, name: &str) -> (String, Order) {
        let (path, own) = split(name);
        let part = |end: &str| own.strip_prefix('_')?.strip_suffix(end);
        let own = match (part("_qdata"), part("_scale")) {
            (Some(own), _) => own.to_string(),
            (_, Some(own)) => format!("{own}_scale"),
            _ => own.to_string(),
        };
        (join(path, &own), Order::AsStored)
    }

    fn source(&self) -> Option<&Path> {
        Some(&self.path)
    }
}
