//! ModelOpt's: one algorithm for all layers, said in two files.

use super::part::grid;
use super::{Layout, Part};
use crate::contents::{Contents, Described};
use crate::error::Result;
use crate::scheme::{InputScheme, Kind};
use crate::spelling::Spelling;
use fp8_core::{Granularity, MX_BLOCK};
use serde_json::{Value, json};

const SPELLING: Spelling = Spelling::ModelOpt;

/// Side of the blocks of `fp8_pb_wo`.
const BLOCK: usize = 128;

/// What `quant_algo` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Algo {
    Fp8,
    PerChannelPerToken,
    PerBlockWeightOnly,
    Mxfp8,
}

impl Algo {
    fn of(kind: Kind) -> Option<Self> {
        const BLOCKS: Granularity = Granularity::Blockwise {
            rows: BLOCK,
            cols: BLOCK,
        };
        match kind.group() {
            _ if kind.has_power_of_two_inputs() => None,
            (Granularity::Tensorwise, InputScheme::Static) => Some(Self::Fp8),
            (Granularity::Tensorwise | Granularity::Rowwise, InputScheme::PerToken) => {
                Some(Self::PerChannelPerToken)
            }
            (BLOCKS, InputScheme::None) => Some(Self::PerBlockWeightOnly),
            (Granularity::Mx, InputScheme::Mx) => Some(Self::Mxfp8),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "FP8",
            Self::PerChannelPerToken => "FP8_PER_CHANNEL_PER_TOKEN",
            Self::PerBlockWeightOnly => "fp8_pb_wo",
            Self::Mxfp8 => "MXFP8",
        }
    }
}

fn algo(contents: &Contents) -> Option<Algo> {
    Algo::of(contents.layers.first()?.kind)
}

pub(super) fn check(contents: &Contents) -> Result<()> {
    let first = algo(contents);
    for layer in &contents.layers {
        match Algo::of(layer.kind) {
            None => return Err(SPELLING.refuses(layer)),
            algo if algo != first => {
                return Err(SPELLING.refuses_because(layer, ", unlike the layers before it"));
            }
            Some(_) => {}
        }
    }
    for scale in &contents.kv {
        if scale.k.len() != 1 || scale.v.len() != 1 {
            return Err(SPELLING.refuses_kv(scale, "one number for keys and one for values"));
        }
    }
    Ok(())
}

pub(super) fn layouts(layer: &Described) -> Vec<Layout> {
    let (rows, cols) = grid(layer, layer.kind.weight);
    let scale = |dims| Layout::scale(Part::WeightScale, "weight_scale", dims);
    let weight_scale = match Algo::of(layer.kind) {
        Some(Algo::PerChannelPerToken) => scale(vec![layer.sizes.0]),
        Some(Algo::Mxfp8) => Layout::exponents("weight_scale", vec![rows, cols]),
        // Their own writer squeezes the scale of a weight that is one block.
        Some(Algo::PerBlockWeightOnly) if rows * cols > 1 => scale(vec![rows, 1, cols, 1]),
        _ => scale(vec![]),
    };
    let mut layouts = vec![Layout::codes(layer), weight_scale];
    if layer.kind.input == InputScheme::Static {
        layouts.push(Layout::scale(Part::InputScale, "input_scale", vec![]));
    }
    layouts
}

fn producer() -> Value {
    // The name is how readers recognise the family.
    json!({ "name": "modelopt", "version": concat!("fp8-", env!("CARGO_PKG_VERSION")) })
}

fn group_size(algo: Option<Algo>) -> Option<usize> {
    match algo {
        Some(Algo::Mxfp8) => Some(MX_BLOCK),
        _ => None,
    }
}

fn kv_algo(contents: &Contents) -> Option<&'static str> {
    (!contents.kv.is_empty()).then_some("FP8")
}

/// `hf_quant_config.json`.
pub(super) fn second_config(contents: &Contents) -> Value {
    let algo = algo(contents);
    let mut quantization = json!({
        "quant_algo": algo.map(Algo::name),
        "kv_cache_quant_algo": kv_algo(contents),
        "exclude_modules": contents.ignored,
    });
    if let Some(size) = group_size(algo) {
        quantization["group_size"] = json!(size);
    }
    json!({ "producer": producer(), "quantization": quantization })
}

pub(super) fn quantization(contents: &Contents) -> Value {
    let algo = algo(contents);
    let mut config = json!({
        "quant_method": "modelopt",
        "quant_algo": algo.map(Algo::name),
        "ignore": contents.ignored,
        "producer": producer(),
    });
    if let Some(size) = group_size(algo) {
        config["group_size"] = json!(size);
    }
    // As ModelOpt writes it, for whoever looks there; only `quant_algo` decides.
    if algo == Some(Algo::Fp8) {
        let args = json!({ "dynamic": false, "num_bits": 8, "type": "float" });
        config["config_groups"] = json!({
            "group_0": { "weights": args, "input_activations": args, "targets": ["Linear"] },
        });
    }
    if kv_algo(contents).is_some() {
        config["kv_cache_scheme"] = json!({ "dynamic": false, "num_bits": 8, "type": "float" });
    }
    config
}
