//! DeepSeek's and Qwen's: blocks of one size, and groups of inputs as wide as a block.

use super::{Layout, Part};
use crate::contents::{Contents, Described, is_head};
use crate::error::{Error, Result};
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
    if let Some(scale) = contents.kv.first() {
        return Err(SPELLING.refuses_kv(scale, "no KV cache scales"));
    }
    check_list(contents)
}

/// Checks that the list of layers in high precision names none in FP8 in any version of transformers. An anchored expression would name its
/// layer alone there, but vLLM compares whole paths.
fn check_list(contents: &Contents) -> Result<()> {
    let listed = listed(contents);
    for layer in &contents.layers {
        let path = &layer.path;
        if let Some(entry) = listed.iter().find(|entry| is_hit(entry, path)) {
            return Err(Error::Inexpressible {
                layer: path.clone(),
                has: format!(
                    "FP8 weights, and the high-precision layer `{entry}` matches its path as a prefix or suffix"
                ),
                spelling: SPELLING,
                takes: "no such pairs, because transformers before 5.21 would leave both in high precision",
            });
        }
    }
    Ok(())
}

/// Whether a version of transformers takes the layer at `path` for one that the list names by `entry`: by the end of its path, or by an
/// expression for its beginning. Before 5.21 that may end inside a name, so that `fc1` names `fc10` too.
fn is_hit(entry: &str, path: &str) -> bool {
    // In an expression a dot is any character.
    let mut bytes = entry.bytes().zip(path.bytes());
    let begins = entry.len() <= path.len() && bytes.all(|(e, p)| e == b'.' || e == p);
    begins || path.ends_with(entry)
}

/// The list of layers in high precision. If it is empty, transformers adds the head on its own.
fn listed(contents: &Contents) -> &[String] {
    match contents.ignored.is_empty() {
        true => &contents.embeddings,
        false => &contents.ignored,
    }
}

/// The layers that vLLM does not read as FP8. It quantizes no head under this method.
pub(super) fn unread_by_vllm(contents: &Contents) -> Vec<&Described> {
    let layers = contents.layers.iter();
    layers.filter(|layer| is_head(&layer.path)).collect()
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
    let mut config = json!({
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": block,
        "modules_to_not_convert": listed(contents),
    });
    if first.is_some_and(|scheme| scheme.input.has_power_of_two_scales()) {
        config["scale_fmt"] = json!("ue8m0");
    }
    config
}
