//! ModelOpt's: one algorithm for all layers, or one for each (`MIXED_PRECISION`), in two configuration files.

use super::{Layout, Part};
use crate::contents::{Contents, Described};
use crate::error::Result;
use crate::scheme::{InputScheme, LayerScheme};
use crate::spelling::Spelling;
use fp8_core::{Granularity, MX_BLOCK};
use serde_json::{Map, Value, json};

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

    fn group_size(self) -> Option<usize> {
        match self {
            Self::Mxfp8 => Some(MX_BLOCK),
            _ => None,
        }
    }
}

/// What the configuration says of all layers together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Declared {
    One(Algo),
    /// Each layer is listed with its own.
    Mixed,
}

impl Declared {
    fn of(contents: &Contents) -> Option<Self> {
        let first = Algo::of(contents.layers.first()?.scheme)?;
        let mut layers = contents.layers.iter();
        Some(
            match layers.all(|layer| Algo::of(layer.scheme) == Some(first)) {
                true => Self::One(first),
                false => Self::Mixed,
            },
        )
    }

    fn name(self) -> &'static str {
        match self {
            Self::One(algo) => algo.name(),
            Self::Mixed => "MIXED_PRECISION",
        }
    }
}

/// `quantized_layers`: the algorithm of each layer.
fn quantized_layers(contents: &Contents) -> Value {
    let mut layers = Map::new();
    for layer in &contents.layers {
        let algo = Algo::of(layer.scheme);
        let mut entry = json!({ "quant_algo": algo.map(Algo::name) });
        if let Some(size) = algo.and_then(Algo::group_size) {
            entry["group_size"] = json!(size);
        }
        layers.insert(layer.path.clone(), entry);
    }
    layers.into()
}

pub(super) fn check(contents: &Contents) -> Result<()> {
    let mut layers = contents.layers.iter();
    if let Some(layer) = layers.find(|layer| Algo::of(layer.scheme).is_none()) {
        return Err(SPELLING.refuses(layer));
    }
    for scale in &contents.kv {
        if scale.k.len() != 1 || scale.v.len() != 1 {
            return Err(SPELLING.refuses_kv(scale, "one number for keys and one for values"));
        }
    }
    Ok(())
}

/// The layers that vLLM does not read as FP8. In a mixture it knows layers in FP8 (and in FP4; newer versions in MXFP8 too). It takes all others
/// for layers in high precision, and so every layer whose path has an excluded one in it.
pub(super) fn unread_by_vllm(contents: &Contents) -> Vec<&Described> {
    let is_mixed = Declared::of(contents) == Some(Declared::Mixed);
    let is_unread = |layer: &&Described| {
        let mut excluded = contents.ignored.iter();
        is_mixed && Algo::of(layer.scheme) != Some(Algo::Fp8)
            || excluded.any(|excluded| layer.path.contains(excluded.as_str()))
    };
    contents.layers.iter().filter(is_unread).collect()
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
    // Readers recognize the family by this name.
    json!({ "name": "modelopt", "version": concat!("fp8-", env!("CARGO_PKG_VERSION")) })
}

/// Adds what both files say beside the name of the algorithm.
fn add_details(declared: Option<Declared>, contents: &Contents, config: &mut Value) {
    match declared {
        Some(Declared::One(algo)) => {
            if let Some(size) = algo.group_size() {
                config["group_size"] = json!(size);
            }
        }
        Some(Declared::Mixed) => config["quantized_layers"] = quantized_layers(contents),
        None => {}
    }
}

fn kv_algo(contents: &Contents) -> Option<&'static str> {
    (!contents.kv.is_empty()).then_some("FP8")
}

/// `hf_quant_config.json`.
pub(super) fn second_config(contents: &Contents) -> Value {
    let declared = Declared::of(contents);
    let mut quantization = json!({
        "quant_algo": declared.map(Declared::name),
        "kv_cache_quant_algo": kv_algo(contents),
        "exclude_modules": contents.ignored,
    });
    add_details(declared, contents, &mut quantization);
    json!({ "producer": producer(), "quantization": quantization })
}

pub(super) fn quantization(contents: &Contents) -> Value {
    let declared = Declared::of(contents);
    let mut config = json!({
        "quant_method": "modelopt",
        "quant_algo": declared.map(Declared::name),
        "ignore": contents.ignored,
        "producer": producer(),
    });
    add_details(declared, contents, &mut config);
    // ModelOpt writes this too. Only `quant_algo` decides.
    if declared == Some(Declared::One(Algo::Fp8)) {
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
