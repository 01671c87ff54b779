//! The model as a whole: whether layers, experts and the head are complete, and fit `config.json`.

use super::fault::Fault;
use super::report::Finding;
use crate::contents::is_head;
use crate::load::FamilyName;
use crate::load::survey::{Layer, Survey, Tensor};
use crate::names::{join, split};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// A limit for findings whose number comes from the configuration.
const MANY: u64 = 1000;

/// Compares the tensors with each other and with `config.json`; `reads` tells whether values may be read.
pub(super) fn findings(survey: &Survey, reads: bool) -> Vec<Finding> {
    let names: BTreeSet<String> = survey
        .tensors()
        .map(|tensor| survey.canonical(tensor.name))
        .filter_map(|name| Some(name.strip_suffix(".weight")?.to_string()))
        .collect();
    let mut found = incomplete(&names);
    if let Some(config) = &survey.config {
        let text = config.get("text_config").filter(|text| text.is_object());
        let text = text.unwrap_or(config);
        found.extend(counted(&names, text));
        found.extend(sizes(survey, text));
        found.extend(head(survey, config, &names, reads));
    }
    found
}

/// Modules that lack a part which the same modules of other layers have.
fn incomplete(names: &BTreeSet<String>) -> Vec<Finding> {
    // The parts of every module, by the module's path without numbers.
    let mut modules: BTreeMap<String, BTreeMap<&str, BTreeSet<&str>>> = BTreeMap::new();
    for name in names {
        let (parent, own) = split(name);
        let parts: Vec<&str> = parent.split('.').collect();
        let is_number = |part: &&str| part.bytes().all(|byte| byte.is_ascii_digit());
        if !parts.iter().any(is_number) {
            continue;
        }
        let pattern = parts
            .iter()
            .map(|part| if is_number(part) { "*" } else { part });
        let pattern = pattern.collect::<Vec<_>>().join(".");
        let module = modules
            .entry(pattern)
            .or_default()
            .entry(parent)
            .or_default();
        module.insert(own);
    }
    let mut found = vec![];
    for alike in modules.values() {
        let mut counts: BTreeMap<&BTreeSet<&str>, usize> = BTreeMap::new();
        for parts in alike.values() {
            *counts.entry(parts).or_default() += 1;
        }
        let usual = counts.iter().max_by_key(|(_, count)| **count);
        let Some((usual, count)) = usual.filter(|(_, count)| 2 * **count > alike.len()) else {
            continue;
        };
        let others = alike
            .iter()
            .filter(|(_, parts)| parts.is_subset(usual) && parts != usual);
        let others: Vec<_> = others.collect();
        // Models with several kinds of layers have many layers of each kind.
        if alike.len() < 3 || others.len() > (alike.len() / 10).max(1) {
            continue;
        }
        for (module, parts) in others {
            for part in usual.difference(parts) {
                let expected = format!("the weight that {count} modules of {} have", alike.len());
                let name = join(&join(module, part), "weight");
                found.push(Finding::new(
                    Fault::LayerIncomplete,
                    name,
                    "no such tensor",
                    expected,
                ));
            }
        }
    }
    found
}

/// Layers and experts that the configuration counts.
fn counted(names: &BTreeSet<String>, config: &Value) -> Vec<Finding> {
    let mut found = vec![];
    let layers = config.get("num_hidden_layers").and_then(Value::as_u64);
    let numbered = numbered(names, &["layers", "layer", "h"]);
    // Towers of other modalities have their own counts.
    let is_other = |path: &str| {
        ["vis", "audio", "image", "mtp", "draft"]
            .iter()
            .any(|word| path.contains(word))
    };
    let stacks: Vec<_> = numbered
        .iter()
        .filter(|(path, _)| !is_other(path))
        .collect();
    if let (Some(count), [(path, numbers)]) = (layers, stacks.as_slice()) {
        let key = "num_hidden_layers";
        found.extend(missing(path, numbers, count, key));
    }
    let keys = ["num_local_experts", "num_experts", "n_routed_experts"];
    let experts = keys
        .iter()
        .find_map(|key| Some((*key, config.get(*key)?.as_u64()?)));
    if let Some((key, count)) = experts {
        for (path, numbers) in self::numbered(names, &["experts"]) {
            found.extend(missing(&path, &numbers, count, key));
        }
    }
    found
}

/// Paths of modules whose parts have numbers, with the numbers.
fn numbered(names: &BTreeSet<String>, lists: &[&str]) -> BTreeMap<String, BTreeSet<u64>> {
    let mut all: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
    for name in names {
        let parts: Vec<&str> = name.split('.').collect();
        for (at, pair) in parts.windows(2).enumerate() {
            if let [list, number] = pair
                && lists.contains(list)
                && let Ok(number) = number.parse()
            {
                all.entry(parts[..=at].join("."))
                    .or_default()
                    .insert(number);
                break;
            }
        }
    }
    all
}

fn missing(path: &str, numbers: &BTreeSet<u64>, count: u64, key: &str) -> Vec<Finding> {
    let absent = (0..count).filter(|number| !numbers.contains(number));
    let found = format!("{} of {count}", numbers.range(..count).count());
    let absent = absent.take(MANY as usize);
    absent
        .map(|number| {
            let expected = format!("`{key}` {count}");
            Finding::new(
                Fault::LayersMissing,
                format!("{path}.{number}"),
                found.as_str(),
                expected,
            )
        })
        .collect()
}

/// Widths that the configuration declares.
fn sizes(survey: &Survey, config: &Value) -> Vec<Finding> {
    let hidden = config.get("hidden_size").and_then(Value::as_u64);
    let Some(hidden) = hidden.and_then(|hidden| usize::try_from(hidden).ok()) else {
        return vec![];
    };
    // Some models have embeddings of another width.
    if config.get("word_embed_proj_dim").is_some() || config.get("embedding_size").is_some() {
        return vec![];
    }
    let is_query =
        |path: &str| path.starts_with("model.layers.") && path.ends_with(".self_attn.q_proj");
    let layers = survey.layers().filter(|layer| is_query(layer.path));
    let layers = layers.map(|Layer { codes, shape, .. }| (codes.name, shape[1]));
    let values = survey.values().filter_map(|(name, tensor)| {
        let path = name.strip_suffix(".weight")?;
        let &[_, width] = tensor.shape() else {
            return None;
        };
        (is_query(path) || split(path).1 == "embed_tokens").then_some((tensor.name, width))
    });
    let wrong = layers.chain(values).filter(|(_, width)| *width != hidden);
    wrong
        .map(|(name, width)| {
            let expected = format!("`hidden_size` {hidden}");
            Finding::new(
                Fault::ConfigShape,
                name,
                format!("{width} columns"),
                expected,
            )
        })
        .collect()
}

/// The output head and the embedding.
fn head(survey: &Survey, config: &Value, names: &BTreeSet<String>, reads: bool) -> Option<Finding> {
    const HEAD: &str = "lm_head";
    let text = config.get("text_config").unwrap_or(&Value::Null);
    let tied = |config: &Value| config.get("tie_word_embeddings").and_then(Value::as_bool);
    let tied = tied(config).or_else(|| tied(text));
    let layer = survey.layer_at(HEAD);
    // vLLM quantizes linear layers only under the method `fp8`.
    let read_plain = [
        FamilyName::AUTO_FP8,
        FamilyName::HF_PER_TENSOR,
        FamilyName::FP8_BLOCKS,
    ];
    if let Some(layer) = layer {
        let name = layer.codes.name;
        if tied == Some(true) {
            let expected = "no head, or one in high precision";
            let found = "FP8, with `tie_word_embeddings` true";
            return Some(Finding::new(
                Fault::TiedHeadQuantized,
                name,
                found,
                expected,
            ));
        }
        return read_plain.contains(&survey.family()).then(|| {
            let found = format!("FP8 in a file of {}", survey.family());
            Finding::new(Fault::HeadQuantized, name, found, "high precision")
        });
    }
    let value = |end: &str| {
        let mut values = survey.values();
        values.find(|(name, _)| *name == end || name.ends_with(&format!(".{end}")))
    };
    let embedding = value("embed_tokens.weight");
    let head = survey.values().find(|(name, _)| *name == "lm_head.weight");
    match (tied, head, embedding) {
        (Some(true), Some((_, head)), Some((_, table))) => {
            differs(head, table, reads).map(|difference| {
                let expected = format!("the same as `{}`", table.name);
                Finding::new(Fault::TiedHeadDiffers, head.name, difference, expected)
            })
        }
        (Some(false), None, Some(_)) => {
            let classes = config.get("architectures").and_then(Value::as_array)?;
            let mut classes = classes.iter().filter_map(Value::as_str);
            let is_causal = classes.any(|class| class.ends_with("ForCausalLM"));
            let has_head = names.iter().any(|path| is_head(path));
            (is_causal && !has_head).then(|| {
                let found = "no such tensor, with `tie_word_embeddings` false";
                Finding::new(Fault::HeadMissing, "lm_head.weight", found, "the head")
            })
        }
        _ => None,
    }
}

/// How two tensors differ, by their headers, and by some of their bytes if they may be read.
fn differs(one: Tensor<'_>, other: Tensor<'_>, reads: bool) -> Option<String> {
    if one.shape() != other.shape() {
        return Some(format!("shape {:?}, not {:?}", one.shape(), other.shape()));
    }
    if one.dtype() != other.dtype() {
        // Values of two dtypes may be equal up to rounding.
        return None;
    }
    const PART: usize = 1 << 12;
    let length = one.len() * one.dtype()?.bitsize() / 8;
    let starts = [0, length / 2, length.saturating_sub(PART)];
    for start in starts.into_iter().filter(|_| reads) {
        let part = start..start + PART;
        let (a, b) = (one.bytes(part.clone()).ok()?, other.bytes(part).ok()?);
        if let Some(at) = a.iter().zip(&b).position(|(a, b)| a != b) {
            return Some(format!("other values, the first at byte {}", start + at));
        }
    }
    None
}
