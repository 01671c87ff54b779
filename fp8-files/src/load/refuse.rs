//! Recognizes tensors of formats other than OCP FP8 by their names and dtypes.

use super::family::Family;
use crate::error::{Error, Result};
use crate::names::split;
use crate::safetensors_file::SafetensorsFile;
use safetensors::Dtype;
use std::path::Path;

/// Names of tensors, and the formats they belong to.
const NAMES: [(&str, &str); 9] = [
    (
        "weight_packed",
        "NVFP4, MXFP4 or an integer format (packed weights)",
    ),
    ("weight_global_scale", "NVFP4"),
    ("input_global_scale", "NVFP4"),
    ("weight_scale_2", "NVFP4"),
    ("weights_scaling_factor", "an engine of TensorRT-LLM"),
    ("activation_scaling_factor", "an engine of TensorRT-LLM"),
    ("kv_cache_scaling_factor", "an engine of TensorRT-LLM"),
    ("qweight", "GPTQ or AWQ"),
    ("qzeros", "GPTQ or AWQ"),
];

/// Fails for a file of scaled arithmetic.
pub(super) fn file(file: &SafetensorsFile) -> Result<()> {
    if !file.is_scaled() {
        return Ok(());
    }
    Err(Error::ForeignFormat {
        path: file.path().to_path_buf(),
        tensor: file.names().next().unwrap_or_default(),
        format: "scaled arithmetic (fp8::scaled::load reads it)".into(),
    })
}

/// Fails for a tensor of a format that this library does not read, or not in files of this family.
pub(super) fn tensor(path: &Path, name: &str, dtype: Dtype, family: &Family) -> Result<()> {
    let own = split(name).1;
    let is_known = family.packs(own, dtype)
        || family.global(own).is_some()
        || family.descriptions.contains(&own);
    let mut names = NAMES.iter();
    let by_name = names.find(|(foreign, _)| *foreign == own && !is_known);
    let format = match (dtype, by_name) {
        (Dtype::F8_E4M3FNUZ | Dtype::F8_E5M2FNUZ, _) => {
            format!("the FP8 of MI300 ({dtype:?}), whose codes mean other values")
        }
        (Dtype::F4 | Dtype::F6_E2M3 | Dtype::F6_E3M2, _) => format!("{dtype:?}"),
        (_, Some((_, format))) => format.to_string(),
        _ => return Ok(()),
    };
    Err(Error::ForeignFormat {
        path: path.to_path_buf(),
        tensor: name.to_string(),
        format,
    })
}
