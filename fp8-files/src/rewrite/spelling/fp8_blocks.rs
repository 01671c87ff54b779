//! DeepSeek's and Qwen's: blocks of one size, and groups of inputs as wide as a block.

use super::{Layout, Part};
use crate::contents::{Contents, Described};
use crate::error::Result;
use crate::scheme::{InputScheme, LayerScheme};
use crate::spelling::Spelling;
use fp8_core::Granularity;
use serde_json::{Value, json};

const SPELLING: Spelling = Spelling::Fp8Blocks;

pub(super) fn check(contents: &Contents) -> Result<()> {
    let mut first = None;
    for layer in &contents.layers {
        let LayerScheme { weight, input } = layer.scheme;
        let (Granularity::Blockwise { rows, cols }, InputScheme::DynamicPerGroup { size, .. }) =
            (weight, input)
        else {
            return Err(SPELLING.refuses(layer));
        };
        if size != cols {
            return Err(SPELLING.refuses(layer));
        }
        let sizes = (rows, cols, input.has_power_of_two_scales());
        if *first.get_or_insert(sizes) != sizes {
            return Err(SPELLING.refuses_because(layer, ", unlike the layers before it"));
        }
    }
    match contents.kv.first() {
        None => Ok(()),
        Some(scale) => Err(SPELLING.refuses_kv(scale, "no KV cache scales")),
    }
}

pub(super) fn weight_scale(layer: &Described) -> Layout {
    Layout::scale(Part::WeightScale, "weight_scale_inv", layer.grid())
}

pub(super) fn quantization(contents: &Contents) -> Value {
    let first = contents.layers.first().map(|layer| layer.scheme);
    let block = match first.map(|scheme| scheme.weight) {
        Some(Granularity::Blockwise { rows, cols }) => [rows, cols],
        _ => [128, 128],
    };
    // With an empty list transformers adds the head on its own.
    let skipped = match contents.ignored.is_empty() {
        true => &contents.embeddings,
        false => &contents.ignored,
    };
    let mut config = json!({
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": block,
        "modules_to_not_convert": skipped,
    });
    if first.is_some_and(|scheme| scheme.input.has_power_of_two_scales()) {
        config["scale_fmt"] = json!("ue8m0");
    }
    config
}
