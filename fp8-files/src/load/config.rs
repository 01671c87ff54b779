//! Finds the family of a model's files, by the configuration beside them.

use super::at::At;
use super::families;
use super::family::Family;
use super::options::OpenOptions;
use crate::error::{Error, Result};
use crate::names::split;
use crate::python_json;
use crate::read::{MAX_CONFIG, read_text_if_present};
use crate::safetensors_file::{SafetensorsFile, any_name};
use safetensors::Dtype;
use serde_json::Value;
use std::path::Path;

/// ModelOpt's own file, beside `config.json` or alone.
pub(super) const SECOND: &str = "hf_quant_config.json";

/// The `config.json` of `directory`, if there is one.
pub(super) fn read(directory: &Path) -> Result<Option<Value>> {
    json(&directory.join("config.json"))
}

/// The family of `files`, which are the model in `directory`, and Mistral's `params.json` if the files are Mistral's own.
pub(super) fn family(
    directory: &Path,
    config: Option<&Value>,
    files: &[&SafetensorsFile],
    options: &OpenOptions,
) -> Result<Native> {
    let path = directory.join("config.json");
    match native(directory, &path, config, files)? {
        Some(native) => Ok(native),
        None => Ok((family_of(directory, &path, config, files, options)?, None)),
    }
}

/// The configuration decides, then metadata, then names.
fn family_of(
    directory: &Path,
    path: &Path,
    config: Option<&Value>,
    files: &[&SafetensorsFile],
    options: &OpenOptions,
) -> Result<Family> {
    let told = match config {
        Some(config) => of_config(path, config, files)?,
        None => None,
    };
    if let Some(family) = told {
        return Ok(family);
    }
    let path = directory.join(SECOND);
    if let Some(config) = json(&path)? {
        return families::modelopt(&At::new(&path, "", &config), None);
    }
    if families::is_torchao(files) {
        families::torchao(None, files)
    } else if families::is_comfy(files) {
        families::comfy(files)
    } else if options.allow_unscaled && !has_scales(files) {
        Ok(families::plain_cast())
    } else {
        Ok(families::by_shape())
    }
}

/// Whether any tensor is a scale of FP8 values: it has the name that a family gives to scales, or that of an FP8 tensor and an end. Parameters
/// such as `logit_scale`, `layer_scale` and the `scale` of a norm are none.
fn has_scales(files: &[&SafetensorsFile]) -> bool {
    any_name(files, |name| {
        let own = split(name).1;
        let of_tensor = ["_scale", "_scale_inv"]
            .iter()
            .find_map(|end| name.strip_suffix(*end));
        families::WEIGHT_SCALES.contains(&own)
            || families::INPUT_SCALES.contains(&own)
            || of_tensor.is_some_and(|tensor| is_fp8(files, tensor))
    })
}

/// Whether a tensor of that name holds FP8 codes.
fn is_fp8(files: &[&SafetensorsFile], name: &str) -> bool {
    let mut dtypes = files.iter().filter_map(|file| file.dtype(name));
    dtypes.any(|dtype| matches!(dtype, Dtype::F8_E4M3 | Dtype::F8_E5M2))
}

/// The family of Mistral's own files, and `params.json` if there is one.
pub(super) type Native = (Family, Option<Value>);

/// Mistral's own files, recognized by their names: a `quantization_config` beside them is about other files. `config.json` may be the
/// only place with the counts of heads.
fn native(
    directory: &Path,
    path: &Path,
    config: Option<&Value>,
    files: &[&SafetensorsFile],
) -> Result<Option<Native>> {
    let has_scales = any_name(files, |name| name.ends_with(".qscale_weight"));
    if !has_scales && !any_name(files, |name| name == "tok_embeddings.weight") {
        return Ok(None);
    }
    let own = directory.join("params.json");
    if let Some(params) = json(&own)? {
        let family = families::mistral(&At::new(&own, "", &params))?;
        return Ok(Some((family, Some(params))));
    }
    match config {
        Some(config) => {
            let at = At::new(path, "", config);
            let family = families::mistral_of_config(&at, has_scales)?;
            Ok(Some((family, None)))
        }
        None if has_scales => Err(Error::NoCheckpoint {
            path: directory.to_path_buf(),
            reason: "expected params.json beside the scales named `qscale_weight`".into(),
        }),
        None => Ok(None),
    }
}

/// A JSON file; None if there is none.
pub(super) fn json(path: &Path) -> Result<Option<Value>> {
    let Some(text) = read_text_if_present(path, MAX_CONFIG)? else {
        return Ok(None);
    };
    let value = python_json::parse(&text)
        .map_err(|error| Error::json(path, "the model's configuration", error))?;
    Ok(Some(value))
}

/// The family that `config.json` names; None if it declares no quantization.
fn of_config(path: &Path, config: &Value, files: &[&SafetensorsFile]) -> Result<Option<Family>> {
    let Some(at) = quantization(path, config) else {
        return Ok(None);
    };
    // Old compressed-tensors files are recognized by the key, some of ModelOpt's by their producer, MLX by the mode.
    let implied = if at.key == "compression_config" {
        Some("compressed-tensors")
    } else if is_modelopt(&at) {
        Some("modelopt")
    } else {
        (!at.get("mode").is_null()).then_some("mlx")
    };
    let second_path = path.with_file_name(SECOND);
    let second = match families::lacks_layers(&at) {
        true => json(&second_path)?,
        false => None,
    };
    let second = second
        .as_ref()
        .map(|second| At::new(&second_path, "", second));
    families::of_method(&at, implied, files, second.as_ref()).map(Some)
}

/// The entry of `config.json` that describes a quantization.
pub(super) fn quantization<'a>(path: &'a Path, config: &'a Value) -> Option<At<'a>> {
    let root = At::new(path, "", config);
    let places = [
        root.get("quantization_config"),
        root.get("text_config").get("quantization_config"),
        root.get("compression_config"),
        root.get("quantization"),
    ];
    places.into_iter().find(|at| !at.is_null())
}

fn is_modelopt(at: &At<'_>) -> bool {
    let has_algo = |at: &At<'_>| !at.get("quant_algo").is_null();
    at.get("producer").get("name").value == "modelopt"
        || has_algo(at)
        || has_algo(&at.get("quantization"))
}
