//! DeepSeek's and Qwen's: blocks of one size, inputs in groups as wide as a block.

use super::part::grid;
use super::{Layout, Part};
use crate::contents::{Contents, Described};
use crate::error::Result;
use crate::scheme::InputScheme;
use crate::spelling::Spelling;
use fp8_core::Granularity;
use serde_json::{Value, json};

const SPELLING: Spelling = Spelling::Fp8Blocks;

pub(super) fn check(contents: &Contents) -> Result<()> {
    let mut first = None;
    for layer in &contents.layers {
        let kind = layer.kind;
        let sizes = match kind.group() {
            (Granularity::Blockwise { rows, cols }, InputScheme::PerGroup(size))
                if size == cols =>
            {
                (rows, cols, kind.has_power_of_two_inputs())
            }
            _ => return Err(SPELLING.refuses(layer)),
        };
        if *first.get_or_insert(sizes) != sizes {
            return Err(SPELLING.refuses_because(layer, ", unlike the layers before it"));
        }
    }
    match contents.kv.first() {
        None => Ok(()),
        Some(scale) => Err(SPELLING.refuses_kv(scale, "no KV cache scales")),
    }
}

pub(super) fn layouts(layer: &Described) -> Vec<Layout> {
    let (rows, cols) = grid(layer, layer.kind.weight);
    vec![
        Layout::codes(layer),
        Layout::scale(Part::WeightScale, "weight_scale_inv", vec![rows, cols]),
    ]
}

pub(super) fn quantization(contents: &Contents) -> Value {
    let first = contents.layers.first().map(|layer| layer.kind);
    let block = match first.map(|kind| kind.weight) {
        Some(Granularity::Blockwise { rows, cols }) => [rows, cols],
        _ => [128, 128],
    };
    // transformers adds the head by itself where the list is empty.
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
    if first.is_some_and(|kind| kind.has_power_of_two_inputs()) {
        config["scale_fmt"] = json!("ue8m0");
    }
    config
}
