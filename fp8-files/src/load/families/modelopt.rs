//! NVIDIA's ModelOpt: `hf_quant_config.json`, or the same in `config.json`.

use super::modules::Modules;
use crate::error::Result;
use crate::load::at::At;
use crate::load::family::{Declared, Family, Global};
use crate::load::family_name::FamilyName;
use crate::scheme::InputScheme;
use fp8_core::Granularity;
use std::collections::HashMap;

impl FamilyName {
    /// NVIDIA's ModelOpt.
    pub const MODEL_OPT: Self = Self::new("modelopt");
}

pub(in crate::load) fn parse(at: &At<'_>) -> Result<Family> {
    // Old exports nest it, as `hf_quant_config.json` does.
    let nested = at.get("quantization");
    let at = if nested.is_null() { at } else { &nested };
    let cache = at.get("kv_cache_quant_algo");
    match cache.value.as_str().map(str::to_ascii_lowercase).as_deref() {
        None if cache.is_null() => {}
        Some("fp8" | "none" | "auto") => {}
        _ => return Err(cache.unsupported("null or FP8")),
    }
    let algo = at.get("quant_algo");
    let name = algo.value.as_str();
    let mut listed = HashMap::new();
    let all = if name.is_some_and(|name| name.eq_ignore_ascii_case("mixed_precision")) {
        let layers = at.get("quantized_layers");
        if !layers.value.is_object() {
            return Err(layers.unsupported("an object of layers"));
        }
        for (path, layer) in layers.entries()? {
            listed.insert(path.to_string(), declared(&layer.get("quant_algo"))?);
        }
        None
    } else {
        Some(declared(&algo)?)
    };
    let excluded = Modules::globs(at, &["exclude_modules", "ignore"])?;
    let layer = move |path: &str| {
        let named = all.or_else(|| listed.get(path).copied());
        Ok(named.filter(|_| !excluded.name(path)))
    };
    Ok(Family {
        weight_scales: &["weight_scale", "weight_scale_inv"],
        packed_weights: &["weight"],
        global_scales: &[("weight_scale_2", Global::Multiplies)],
        ..Family::new(FamilyName::MODEL_OPT, Some(at.path), layer)
    })
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
