//! NVIDIA's ModelOpt: `hf_quant_config.json`, or the same in `config.json`.

use super::modules::Modules;
use crate::contents::HEAD;
use crate::error::Result;
use crate::load::at::At;
use crate::load::family::{Declared, Family, Global};
use crate::load::family_name::FamilyName;
use crate::names::split;
use crate::scheme::InputScheme;
use fp8_core::Granularity;
use std::collections::HashMap;

impl FamilyName {
    /// NVIDIA's ModelOpt.
    pub const MODEL_OPT: Self = Self::new("modelopt");
}

/// Lists of modules in high precision, in either file.
pub(in crate::load) const EXCLUDED: [&str; 2] = ["exclude_modules", "ignore"];

/// The entries themselves. Old exports nest them, as `hf_quant_config.json` does.
pub(in crate::load) fn entries<'a>(at: &At<'a>) -> At<'a> {
    let nested = at.get("quantization");
    match nested.is_null() {
        true => at.clone(),
        false => nested,
    }
}

/// Whether each layer has an algorithm of its own.
fn is_mixed(at: &At<'_>) -> bool {
    let name = at.get("quant_algo").value.as_str();
    name.is_some_and(|name| name.eq_ignore_ascii_case("mixed_precision"))
}

/// Whether a configuration leaves the list of its layers to ModelOpt's other file, as older writers do in `config.json`.
pub(in crate::load) fn lacks_layers(at: &At<'_>) -> bool {
    let at = entries(at);
    is_mixed(&at) && at.get("quantized_layers").is_null()
}

/// `second` is the other file, if `at` [lacks its list](lacks_layers).
pub(in crate::load) fn parse(at: &At<'_>, second: Option<&At<'_>>) -> Result<Family> {
    let at = &entries(at);
    let cache = at.get("kv_cache_quant_algo");
    match cache.value.as_str().map(str::to_ascii_lowercase).as_deref() {
        None if cache.is_null() => {}
        Some("fp8" | "none" | "auto") => {}
        _ => return Err(cache.unsupported("null or FP8")),
    }
    let mut excluded = vec![Modules::globs(at, &EXCLUDED)?];
    let mut listed = HashMap::new();
    let all = if is_mixed(at) {
        let mut layers = at.get("quantized_layers");
        if let Some(second) = second.filter(|_| layers.is_null()).map(entries) {
            excluded.push(Modules::globs(&second, &EXCLUDED)?);
            layers = second.get("quantized_layers");
        }
        if !layers.value.is_object() {
            return Err(layers.unsupported("an object of layers"));
        }
        for (path, layer) in layers.entries()? {
            listed.insert(path.to_string(), declared(&layer.get("quant_algo"))?);
        }
        None
    } else {
        Some(declared(&at.get("quant_algo"))?)
    };
    let layer = move |path: &str| {
        let of_path = || other_paths(path).find_map(|path| listed.get(&path).copied());
        let named = all.or_else(|| listed.get(path).copied()).or_else(of_path);
        Ok(named.filter(|_| !excluded.iter().any(|modules| modules.name(path))))
    };
    Ok(Family {
        weight_scales: &["weight_scale", "weight_scale_inv"],
        packed_weights: &["weight"],
        global_scales: &[("weight_scale_2", Global::Multiplies)],
        ..Family::new(FamilyName::MODEL_OPT, Some(at.path), layer)
    })
}

/// What a list may call the layer at `path` instead. A language model within another model has two prefixes, by the version of transformers,
/// and its head one or none, so a list may have another than the tensors. vLLM tries the same.
fn other_paths(path: &str) -> impl Iterator<Item = String> {
    const PREFIXES: [&str; 2] = ["model.language_model.", "language_model.model."];
    let [one, other] = PREFIXES;
    let replaced = |from: &str, to: &str| Some(format!("{to}{}", path.strip_prefix(from)?));
    let head = match split(path) {
        ("", HEAD) => Some(format!("language_model.{HEAD}")),
        (_, HEAD) => Some(HEAD.to_string()),
        _ => None,
    };
    [replaced(one, other), replaced(other, one), head]
        .into_iter()
        .flatten()
}

/// What the name of an algorithm declares, in any case.
fn declared(algo: &At<'_>) -> Result<Declared> {
    const EXPECTED: &str = "FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, MXFP8, \
         NVFP4, W4A16_NVFP4 or MIXED_PRECISION";
    let name = algo.text(EXPECTED)?.to_ascii_lowercase();
    Ok(match name.as_str() {
        "fp8" => Declared::new(Granularity::Tensorwise, InputScheme::Static(())),
        "fp8_per_channel_per_token" => {
            Declared::new(Granularity::Rowwise, InputScheme::per_token())
        }
        "fp8_pb_wo" => {
            let (rows, cols) = (128, 128);
            Declared::new(Granularity::Blockwise { rows, cols }, InputScheme::None)
        }
        "mxfp8" => Declared::new(Granularity::Mx, InputScheme::DynamicMx),
        // Inputs in FP4 stay in high precision, as on processors without products in FP4.
        "nvfp4" | "w4a16_nvfp4" => Declared::nvfp4(InputScheme::None),
        _ => return Err(algo.unsupported(EXPECTED)),
    })
}
