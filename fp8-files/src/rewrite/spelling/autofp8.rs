//! AutoFP8's: one scale per weight.

use super::{Layout, Part};
use crate::contents::{Contents, is_head};
use crate::error::Result;
use crate::scheme::InputScheme;
use crate::spelling::Spelling;
use fp8_core::Granularity;
use serde_json::{Value, json};

const SPELLING: Spelling = Spelling::AutoFp8;

pub(super) fn check(contents: &Contents) -> Result<()> {
    let mut first = None;
    for layer in &contents.layers {
        let input = layer.scheme.input;
        let fits = matches!(
            input,
            InputScheme::Static(()) | InputScheme::DynamicPerToken { .. }
        );
        let is_plain = layer.scheme.weight == Granularity::Tensorwise && fits;
        if !is_plain || input.has_power_of_two_scales() {
            return Err(SPELLING.refuses(layer));
        }
        if *first.get_or_insert(input) != input {
            return Err(SPELLING.refuses_because(layer, ", unlike the layers before it"));
        }
        if is_head(&layer.path) {
            return Err(SPELLING.refuses_because(layer, " in the head"));
        }
    }
    for scale in &contents.kv {
        if scale.k.len() != 1 || scale.k != scale.v {
            return Err(SPELLING.refuses_kv(scale, "one number for keys and values"));
        }
    }
    Ok(())
}

pub(super) fn weight_scale() -> Layout {
    Layout::scale(Part::WeightScale, "weight_scale", vec![])
}

pub(super) fn quantization(contents: &Contents) -> Value {
    let first = contents.layers.first().map(|layer| layer.scheme.input);
    let scheme = match first {
        Some(InputScheme::Static(())) => "static",
        _ => "dynamic",
    };
    let mut config = json!({
        "quant_method": "fp8",
        "activation_scheme": scheme,
        "ignored_layers": contents.ignored,
    });
    if !contents.kv.is_empty() {
        config["kv_cache_scheme"] = json!("static");
    }
    config
}
