//! Scales of KV caches, and tensors that look like scales but have no known name.

use super::fault::Fault;
use super::report::Finding;
use super::scales::{self, Numbers};
use crate::load::survey::Survey;
use crate::names::{join, split};
use serde_json::Value;
use std::collections::BTreeSet;

/// Bytes of the largest scale of a cache.
const SMALL: usize = 1 << 16;

/// Looks at the scales of caches, and at unknown scales.
pub(super) fn findings(survey: &Survey) -> Vec<Finding> {
    let mut found = unknown(survey);
    let mut all_one = true;
    let mut names: Vec<&str> = vec![];
    for (_, tensor) in survey.cache_scales() {
        let Some(numbers) = Numbers::read(tensor, SMALL) else {
            continue;
        };
        scales::check(tensor, &numbers, &mut found);
        if numbers.zeros > 0 {
            found.push(Finding::new(
                Fault::ScaleZero,
                tensor.name,
                "0",
                "a positive number",
            ));
        }
        all_one &= numbers.all_one();
        names.push(tensor.name);
    }
    names.dedup();
    if all_one {
        let ones = names.iter().map(|name| {
            let expected = "amax / 448 of calibrated keys and values";
            Finding::new(Fault::KvScalesOne, *name, "1", expected)
        });
        found.extend(ones);
    }
    let known: BTreeSet<&str> = survey.cache_scales().map(|(name, _)| name).collect();
    let misspelt = found.iter().any(|f| f.fault == Fault::KvScaleUnknown);
    if known.is_empty() && !misspelt {
        found.extend(declared(survey));
    }
    found.extend(partial(survey, &known));
    found
}

/// The finding for a configuration that promises stored scales of a cache.
fn declared(survey: &Survey) -> Option<Finding> {
    let config = survey.config.as_ref()?;
    let text = config.pointer("/text_config/quantization_config");
    let at = config.get("quantization_config").or(text)?;
    let scheme = at
        .get("kv_cache_scheme")
        .filter(|scheme| scheme.is_object());
    let is_dynamic = scheme.is_some_and(|scheme| scheme["dynamic"] != Value::Bool(false));
    let algo = at.get("kv_cache_quant_algo").and_then(Value::as_str);
    let is_fp8 = algo.is_some_and(|algo| algo.eq_ignore_ascii_case("fp8"));
    let entry = match (scheme, is_fp8) {
        (Some(_), _) if !is_dynamic => "kv_cache_scheme",
        (None, true) => "kv_cache_quant_algo",
        _ => return None,
    };
    let expected = "`k_scale` and `v_scale` in every attention";
    Some(Finding::new(
        Fault::KvScalesMissing,
        entry,
        "no scale of a cache",
        expected,
    ))
}

/// Attention modules without scales, where others have them.
fn partial(survey: &Survey, known: &BTreeSet<&str>) -> Vec<Finding> {
    if known.is_empty() {
        return vec![];
    }
    let modules: BTreeSet<String> = survey
        .tensors()
        .map(|tensor| survey.canonical(tensor.name))
        .filter_map(|name| Some(name.strip_suffix(".k_proj.weight")?.to_string()))
        .collect();
    let mut found = vec![];
    for module in modules {
        for own in ["k_scale", "v_scale"] {
            let name = join(&module, own);
            if !known.contains(name.as_str()) {
                let expected = format!("a scale, as the {} others", known.len());
                found.push(Finding::new(
                    Fault::KvScalesPartial,
                    name,
                    "no such tensor",
                    expected,
                ));
            }
        }
    }
    found
}

/// Tensors that look like scales and belong to a layer or to an attention, under names that no family has.
fn unknown(survey: &Survey) -> Vec<Finding> {
    let mut found = vec![];
    for (name, tensor) in survey.values() {
        let (path, own) = split(name);
        if !own.contains("scale") && !own.contains("scaling_factor") {
            continue;
        }
        if let Some(layer) = survey.layer_at(path) {
            // The norm inside a module may have a `scale`.
            if own == "scale" {
                continue;
            }
            let fault = match (Survey::is_scale_name(name), layer.scale) {
                (true, Some(_)) => Fault::DuplicateSpelling,
                _ => Fault::UnknownScale,
            };
            let names = layer.scale.map_or("its scale", |scale| scale.name);
            let text = format!("beside `{names}`");
            found.push(Finding::new(
                fault,
                tensor.name,
                text,
                "one scale, by the family's name",
            ));
        } else if !Survey::is_scale_name(name) && is_cache(path, own) {
            let expected = "`k_scale` and `v_scale`";
            let text = format!("shape {:?}", tensor.shape());
            found.push(Finding::new(
                Fault::KvScaleUnknown,
                tensor.name,
                text,
                expected,
            ));
        }
    }
    found
}

/// Whether a name is that of a scale of keys and values.
fn is_cache(path: &str, own: &str) -> bool {
    let is_attention = |part: &str| {
        let part = part.to_ascii_lowercase();
        part.contains("attn") || part.contains("attention")
    };
    let mut parts = path
        .rsplit('.')
        .take(3)
        .skip_while(|part| !is_attention(part));
    if parts.next().is_none() {
        return false;
    }
    let inside = path.rsplit('.').take_while(|part| !is_attention(part));
    let words = inside.chain([own]).flat_map(|part| part.split('_'));
    const WORDS: [&str; 7] = ["k", "v", "kv", "key", "value", "cache", "keys"];
    words.into_iter().any(|word| WORDS.contains(&word))
}
