//! ModelOpt's: one algorithm for all layers, in two configuration files.

use super::{Layout, Part};
use crate::contents::{Contents, Described};
use crate::error::Result;
use crate::scheme::{InputScheme, LayerScheme};
use crate::spelling::Spelling;
use fp8_core::{Granularity, MX_BLOCK};
use serde_json::{Value, json};

const SPELLING: Spelling = Spelling::ModelOpt;

/// The values of `quant_algo`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Algo {
    Fp8,
    PerChannelPerToken,
    PerBlockWeightOnly,
    Mxfp8,
}

impl Algo {
    fn of(scheme: LayerScheme) -> Option<Self> {
        const BLOCKS: Granularity = Granularity::Blockwise {
            rows: 128,
            cols: 128,
        };
        match (scheme.weight, scheme.input) {
            (_, input) if input.has_power_of_two_scales() => None,
            (Granularity::Tensorwise, InputScheme::Static(())) => Some(Self::Fp8),
            (
                Granularity::Tensorwise | Granularity::Rowwise,
                InputScheme::DynamicPerToken { .. },
            ) => Some(Self::PerChannelPerToken),
            (BLOCKS, InputScheme::None) => Some(Self::PerBlockWeightOnly),
            (Granularity::Mx, InputScheme::DynamicMx) => Some(Self::Mxfp8),
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
    Algo::of(contents.layers.first()?.scheme)
}

pub(super) fn check(contents: &Contents) -> Result<()> {
    let first = algo(contents);
    for layer in &contents.layers {
        match Algo::of(layer.scheme) {
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

pub(super) fn weight_scale(layer: &Described) -> Layout {
    let scale = |dims| Layout::scale(Part::WeightScale, "weight_scale", dims);
    let grid = layer.grid();
    match Algo::of(layer.scheme) {
        Some(Algo::PerChannelPerToken) => scale(vec![layer.sizes.0]),
        Some(Algo::Mxfp8) => Layout::exponents("weight_scale", grid),
        // ModelOpt's own writer squeezes the scale of a weight that is one block.
        Some(Algo::PerBlockWeightOnly) if grid[0] * grid[1] > 1 => {
            scale(vec![grid[0], 1, grid[1], 1])
        }
        _ => scale(vec![]),
    }
}

fn producer() -> Value {
    // Readers recognise the family by this name.
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
    // ModelOpt writes this too. Only `quant_algo` decides.
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
