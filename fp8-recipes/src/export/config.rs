//! The configuration beside an exported model.

use super::collect::Collected;
use super::scheme::Scheme;
use crate::error::{Error, Result};
use crate::load::InputScheme;
use crate::read::read_text;
use fp8_core::{Granularity, MX_BLOCK};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Longer than any configuration.
const MAX_CONFIG: u64 = 64 << 20;

/// The given entries, or those of the configuration file, with `quantization_config` put in.
pub(super) fn merged(
    path: &Path,
    given: Option<&Map<String, Value>>,
    collected: &Collected,
) -> Result<Value> {
    let mut config = match given {
        Some(given) => given.clone(),
        None => entries(path)?,
    };
    config.insert("quantization_config".into(), quantization(collected));
    Ok(config.into())
}

/// The entries of the file; none if there is no file.
fn entries(path: &Path) -> Result<Map<String, Value>> {
    match read_text(path, MAX_CONFIG) {
        Err(Error::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            Ok(Map::new())
        }
        text => serde_json::from_str(&text?).map_err(|error| Error::Json {
            path: path.to_path_buf(),
            what: "the object at its root",
            reason: error.to_string(),
        }),
    }
}

fn quantization(collected: &Collected) -> Value {
    // In the order of their first layers.
    let mut groups: Vec<(Scheme, Vec<&str>)> = vec![];
    for (path, scheme) in &collected.quantized {
        match groups
            .iter_mut()
            .find(|(other, _)| other.group() == scheme.group())
        {
            Some((_, paths)) => paths.push(path),
            None => groups.push((*scheme, vec![path])),
        }
    }
    let formats: Vec<&str> = groups.iter().map(|(scheme, _)| format(scheme)).collect();
    let overall = match formats.as_slice() {
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
                "targets": if several { json!(paths) } else { json!(["Linear"]) },
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
        "ignore": collected.ignored,
        "kv_cache_scheme": null,
    })
}

fn format(scheme: &Scheme) -> &'static str {
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
