//! compressed-tensors: groups of layers with arguments for weights and inputs.

use super::{Layout, Part};
use crate::contents::{Contents, Described, is_head};
use crate::error::Result;
use crate::scheme::{InputScheme, LayerScheme};
use crate::spelling::Spelling;
use fp8_core::{Granularity, MX_BLOCK};
use serde_json::{Map, Value, json};

const SPELLING: Spelling = Spelling::CompressedTensors;

pub(super) fn check(contents: &Contents) -> Result<()> {
    let mut layers = contents.layers.iter();
    if let Some(layer) = layers.find(|layer| layer.scheme.mixes_microscaling()) {
        return Err(SPELLING.refuses(layer));
    }
    let mut heads = contents.kv.iter().map(|kv| (kv.k.len() > 1, kv));
    if let Some((first, _)) = heads.next()
        && let Some((_, other)) = heads.find(|(per_head, _)| *per_head != first)
    {
        return Err(SPELLING.refuses_kv(other, "either per tensor or per head in all layers"));
    }
    Ok(())
}

pub(super) fn weight_scale(layer: &Described) -> Layout {
    let grid = layer.grid();
    match layer.scheme.weight {
        Granularity::Tensorwise => Layout::scale(Part::WeightScale, "weight_scale", vec![1]),
        Granularity::Mx => Layout::exponents("weight_scale", grid),
        _ => Layout::scale(Part::WeightScale, "weight_scale", grid),
    }
}

pub(super) fn quantization(contents: &Contents) -> Value {
    // In the order of their first layers. The configuration has no key for powers of two.
    let mut groups: Vec<(LayerScheme, Vec<&str>)> = vec![];
    for layer in &contents.layers {
        let scheme = layer.scheme.with_exact_inputs();
        match groups.iter_mut().find(|(other, _)| *other == scheme) {
            Some((_, paths)) => paths.push(&layer.path),
            None => groups.push((scheme, vec![&layer.path])),
        }
    }
    let formats: Vec<&str> = groups.iter().map(|(scheme, _)| format(scheme)).collect();
    let overall = match formats.as_slice() {
        [] => "float-quantized",
        [first, rest @ ..] if rest.iter().all(|other| other == first) => first,
        _ => "mixed-precision",
    };
    let several = groups.len() > 1;
    let config_groups: Map<String, Value> = groups
        .iter()
        .enumerate()
        .map(|(i, (scheme, paths))| {
            let group = json!({
                "format": format(scheme),
                "targets": targets(paths, several),
                "weights": weights(scheme.weight),
                "input_activations": inputs(scheme.input),
                "output_activations": null,
            });
            (format!("group_{i}"), group)
        })
        .collect();
    json!({
        "quant_method": "compressed-tensors",
        "format": overall,
        "quantization_status": "compressed",
        "config_groups": config_groups,
        "ignore": contents.ignored,
        "kv_cache_scheme": kv_cache_scheme(contents),
    })
}

/// The class of all layers, or the layers of the group by name. Heads have another class in vLLM, so they are named too.
fn targets<'a>(paths: &[&'a str], several: bool) -> Vec<&'a str> {
    match several {
        true => paths.to_vec(),
        false => {
            let heads = paths.iter().copied().filter(|path| is_head(path));
            ["Linear"].into_iter().chain(heads).collect()
        }
    }
}

fn kv_cache_scheme(contents: &Contents) -> Value {
    match contents.kv.first() {
        None => Value::Null,
        Some(scale) if scale.k.len() > 1 => args("attn_head", false, None),
        Some(_) => args("tensor", false, None),
    }
}

fn format(scheme: &LayerScheme) -> &'static str {
    match (scheme.weight, scheme.input) {
        (Granularity::Mx, _) => "mxfp8-quantized",
        (_, InputScheme::None) => "naive-quantized",
        _ => "float-quantized",
    }
}

fn args(strategy: &str, dynamic: bool, group_size: Option<usize>) -> Value {
    json!({
        "num_bits": 8,
        "type": "float",
        "symmetric": true,
        "strategy": strategy,
        "dynamic": dynamic,
        "group_size": group_size,
    })
}

/// Groups of 32 with scales as bytes.
fn mx_args(dynamic: bool) -> Value {
    let mut args = args("group", dynamic, Some(MX_BLOCK));
    args["scale_dtype"] = json!("torch.uint8");
    args
}

fn weights(granularity: Granularity) -> Value {
    match granularity {
        Granularity::Tensorwise => args("tensor", false, None),
        Granularity::Rowwise => args("channel", false, None),
        Granularity::Blockwise { rows, cols } => {
            let mut args = args("block", false, None);
            args["block_structure"] = json!([rows, cols]);
            args
        }
        Granularity::Mx => mx_args(false),
    }
}

fn inputs(input: InputScheme) -> Value {
    match input {
        InputScheme::None => Value::Null,
        InputScheme::Static(()) => args("tensor", false, None),
        InputScheme::DynamicPerToken { .. } => args("token", true, None),
        InputScheme::DynamicPerTensor { .. } => args("tensor", true, None),
        InputScheme::DynamicPerGroup { size, .. } => args("group", true, Some(size)),
        InputScheme::DynamicMx => mx_args(true),
    }
}
