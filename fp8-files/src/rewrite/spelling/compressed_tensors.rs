//! compressed-tensors: groups of layers with arguments for weights and inputs.

use super::part::grid;
use super::{Layout, Part};
use crate::contents::{Contents, Described, is_head};
use crate::error::Result;
use crate::scheme::{InputScheme, Kind};
use crate::spelling::Spelling;
use fp8_core::{Granularity, MX_BLOCK};
use serde_json::{Map, Value, json};

const SPELLING: Spelling = Spelling::CompressedTensors;

pub(super) fn check(contents: &Contents) -> Result<()> {
    for layer in &contents.layers {
        match layer.kind.group() {
            (Granularity::Mx, InputScheme::Mx | InputScheme::None) => {}
            (Granularity::Mx, _) | (_, InputScheme::Mx) => return Err(SPELLING.refuses(layer)),
            _ => {}
        }
    }
    let mut heads = contents.kv.iter().map(|kv| (kv.k.len() > 1, kv));
    if let Some((first, _)) = heads.next()
        && let Some((_, other)) = heads.find(|(per_head, _)| *per_head != first)
    {
        return Err(SPELLING.refuses_kv(other, "either per tensor or per head in all layers"));
    }
    Ok(())
}

pub(super) fn layouts(layer: &Described) -> Vec<Layout> {
    let (rows, cols) = grid(layer, layer.kind.weight);
    let scale = |dims| Layout::scale(Part::WeightScale, "weight_scale", dims);
    let weight_scale = match layer.kind.weight {
        Granularity::Tensorwise => scale(vec![1]),
        Granularity::Mx => Layout::exponents("weight_scale", vec![rows, cols]),
        _ => scale(vec![rows, cols]),
    };
    let mut layouts = vec![Layout::codes(layer), weight_scale];
    if layer.kind.input == InputScheme::Static {
        layouts.push(Layout::scale(Part::InputScale, "input_scale", vec![1]));
    }
    layouts
}

pub(super) fn quantization(contents: &Contents) -> Value {
    // In the order of their first layers.
    let mut groups: Vec<(Kind, Vec<&str>)> = vec![];
    for layer in &contents.layers {
        let same = |(other, _): &&mut (Kind, _)| other.group() == layer.kind.group();
        match groups.iter_mut().find(same) {
            Some((_, paths)) => paths.push(&layer.path),
            None => groups.push((layer.kind, vec![&layer.path])),
        }
    }
    let formats: Vec<&str> = groups.iter().map(|(kind, _)| format(kind)).collect();
    let overall = match formats.as_slice() {
        [] => "float-quantized",
        [first, rest @ ..] if rest.iter().all(|other| other == first) => first,
        _ => "mixed-precision",
    };
    let several = groups.len() > 1;
    let config_groups: Map<String, Value> = groups
        .iter()
        .enumerate()
        .map(|(i, (kind, paths))| {
            let group = json!({
                "format": format(kind),
                "targets": targets(paths, several),
                "weights": weights(kind.weight),
                "input_activations": inputs(kind.input),
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

/// All layers of the class, or those of the group by name. vLLM's class of heads is another one, so they are named.
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

fn format(kind: &Kind) -> &'static str {
    match kind.group() {
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

/// Groups of 32 with scales in bytes.
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
        InputScheme::Static => args("tensor", false, None),
        InputScheme::PerToken => args("token", true, None),
        InputScheme::PerTensor => args("tensor", true, None),
        InputScheme::PerGroup(size) => args("group", true, Some(size)),
        InputScheme::Mx => mx_args(true),
    }
}
