//! Finds the family of a model's files, by the configuration beside them.

use super::at::At;
use super::families;
use super::family::Family;
use super::options::OpenOptions;
use crate::error::{Error, Result};
use crate::names::split;
use crate::read::{MAX_CONFIG, read_text_if_present};
use crate::safetensors_file::{SafetensorsFile, any_name};
use serde_json::Value;
use std::path::Path;

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
    let path = directory.join("hf_quant_config.json");
    if let Some(config) = json(&path)? {
        return families::modelopt(&At::new(&path, "", &config));
    }
    if families::is_torchao(files) {
        families::torchao(None, files)
    } else if families::is_comfy(files) {
        families::comfy(files)
    } else if options.allow_unscaled && !any_name(files, is_scale) {
        Ok(families::plain_cast())
    } else {
        Ok(families::by_shape())
    }
}

/// Whether a tensor is a scale of FP8 values, in any family. The `scale` of a norm is not.
fn is_scale(name: &str) -> bool {
    let own = split(name).1;
    let ends = [
        "_scale",
        "_scale_inv",
        "scale_weight",
        "scale_input",
        "scales",
    ];
    ends.iter().any(|end| own.ends_with(end)) || own.contains("qscale")
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
    let value = serde_json::from_str(&text)
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
    families::of_method(&at, implied, files).map(Some)
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
