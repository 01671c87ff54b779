//! What the configuration says of layers, compared with the tensors.

use super::fault::Fault;
use super::layers::FUSED;
use super::report::Finding;
use crate::contents::{Role, is_head, role_by_name};
use crate::load::FamilyName;
use crate::load::survey::{Kind, Listed, Survey};
use crate::names::{join, near, split};
use safetensors::Dtype;
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// Names of layers that hold several others, fused.
const FUSED_NAMES: [(&str, usize); 4] = [
    ("qkv_proj", 0),
    ("query_key_value", 0),
    ("W_pack", 0),
    ("gate_up_proj", 1),
];

/// Compares the configuration with the tensors.
pub(super) fn findings(survey: &Survey) -> Vec<Finding> {
    let plain = plain_layers(survey);
    let mut found = declared(survey, &plain);
    found.extend(fused(survey, &plain));
    let modules = modules(survey);
    let is_unlisted = found.iter().any(|f| f.fault == Fault::LayerNotQuantized);
    found.extend(
        survey
            .lists
            .iter()
            .filter_map(|listed| entry(listed, &modules, is_unlisted)),
    );
    found.extend(whole(survey, &plain));
    found.extend(differences(survey));
    found
}

/// Contradictions of two configuration files.
fn differences(survey: &Survey) -> impl Iterator<Item = Finding> {
    survey.differences.iter().map(|difference| {
        let expected = format!("{}, as config.json says", difference.expected);
        let key = difference.key.as_str();
        Finding::new(
            Fault::ConfigsDiffer,
            key,
            difference.found.as_str(),
            expected,
        )
    })
}

/// Canonical paths of linear layers in high precision, with the stored names of their weights.
fn plain_layers(survey: &Survey) -> BTreeMap<String, String> {
    let floats = [Dtype::F32, Dtype::BF16, Dtype::F16];
    let values = survey.values().filter(|(_, tensor)| {
        tensor.shape().len() == 2 && tensor.dtype().is_some_and(|dtype| floats.contains(&dtype))
    });
    values
        .filter_map(|(name, tensor)| match role_by_name(name)? {
            (path, Role::Linear) => Some((path.to_string(), tensor.name.to_string())),
            _ => None,
        })
        .collect()
}

/// Layers in high precision that the configuration declares FP8, where layers of the same name are.
fn declared(survey: &Survey, plain: &BTreeMap<String, String>) -> Vec<Finding> {
    let roles: HashSet<&str> = survey.layers().map(|layer| split(layer.path).1).collect();
    let by_tensors = [
        FamilyName::MISTRAL_NATIVE,
        FamilyName::MLX,
        FamilyName::BY_SHAPE,
    ];
    if !survey.has_source() || by_tensors.contains(&survey.family()) {
        return vec![];
    }
    let found = plain.iter().filter_map(|(path, stored)| {
        if !roles.contains(split(path).1) || !survey.declares(path) {
            return None;
        }
        let dtype = survey.tensor(stored)?.dtype()?;
        let expected = "F8_E4M3, as the configuration says of it";
        Some(Finding::new(
            Fault::LayerNotQuantized,
            stored,
            format!("{dtype:?}"),
            expected,
        ))
    });
    found.collect()
}

/// Layers in high precision beside FP8 ones with which engines fuse them.
fn fused(survey: &Survey, plain: &BTreeMap<String, String>) -> Vec<Finding> {
    let found = plain.iter().filter_map(|(path, stored)| {
        let (parent, own) = split(path);
        let parts = FUSED.iter().find(|parts| parts.contains(&own))?;
        let fp8: Vec<&str> = parts
            .iter()
            .copied()
            .filter(|part| survey.layer_at(&join(parent, part)).is_some())
            .collect();
        if fp8.is_empty() {
            return None;
        }
        let text = format!(
            "high precision, while {} of `{parent}` are FP8",
            fp8.join(", ")
        );
        Some(Finding::new(
            Fault::FusedPartlyQuantized,
            stored,
            text,
            "all of them alike",
        ))
    });
    found.collect()
}

/// Paths of all modules with tensors in them, by canonical and by stored names.
fn modules(survey: &Survey) -> BTreeSet<String> {
    let mut modules = BTreeSet::new();
    for tensor in survey.tensors() {
        for name in [tensor.name.to_string(), survey.canonical(tensor.name)] {
            let mut path = name.as_str();
            while let Some((parent, _)) = path.rsplit_once('.') {
                if parent.is_empty() || !modules.insert(parent.to_string()) {
                    break;
                }
                path = parent;
            }
        }
    }
    modules
}

/// The finding of an entry that names no module.
fn entry(listed: &Listed, modules: &BTreeSet<String>, is_unlisted: bool) -> Option<Finding> {
    if listed.is_class() || modules.iter().any(|path| listed.names(path)) {
        return None;
    }
    let text = listed.text.as_str();
    let new = |fault, expected: String| {
        let found = format!("no module of that name, in {}", listed.place);
        Some(Finding::new(fault, text, found, expected))
    };
    let (parent, own) = split(text);
    let parts = FUSED_NAMES.iter().find(|(name, _)| *name == own);
    if let Some((_, at)) = parts.filter(|_| listed.kind == Kind::Ignored) {
        let has = |part: &&str| modules.contains(&join(parent, part));
        let there: Vec<&str> = FUSED[*at].iter().copied().filter(has).collect();
        if !there.is_empty() {
            return new(Fault::IgnoreFusedName, there.join(", "));
        }
    }
    if listed.kind == Kind::Ignored && (is_absent(text) || listed.is_pattern() && !is_unlisted) {
        return None;
    }
    let likely = near(text, modules.iter().map(String::as_str));
    let expected = match likely.first() {
        Some(likely) => format!("a module, such as `{likely}`"),
        None => "a module of the model".to_string(),
    };
    match listed.kind {
        Kind::Ignored => new(Fault::IgnoreMatchesNothing, expected),
        Kind::Target => new(Fault::TargetMatchesNothing, expected),
    }
}

/// Layers that lists name although a model may not have them: heads that are tied to the embedding, poolers.
fn is_absent(path: &str) -> bool {
    let own = split(path).1;
    is_head(path)
        || is_head(own)
        || path.ends_with("pooler.dense")
        || matches!(
            role_by_name(&join(path, "weight")),
            Some((_, Role::Embedding | Role::Unknown | Role::Router))
        )
}

/// Findings about all tensors together.
fn whole(survey: &Survey, plain: &BTreeMap<String, String>) -> Option<Finding> {
    let codes = [
        Dtype::F8_E4M3,
        Dtype::F8_E5M2,
        Dtype::F8_E4M3FNUZ,
        Dtype::F8_E5M2FNUZ,
    ];
    let has_codes = survey
        .tensors()
        .any(|tensor| tensor.dtype().is_some_and(|dtype| codes.contains(&dtype)));
    let is_fp8_declared = plain.keys().any(|path| survey.declares(path));
    if survey.has_source() && is_fp8_declared && !has_codes && survey.refused.is_empty() {
        let found = format!("no FP8 tensor, in a folder of {}", survey.family());
        let expected = "F8_E4M3 weights";
        return Some(Finding::new(
            Fault::ConfigWithoutFp8,
            "quantization_config",
            found,
            expected,
        ));
    }
    let scaled = survey
        .layers()
        .filter(|layer| layer.scale.is_some())
        .count();
    if survey.family() == FamilyName::BY_SHAPE
        && survey.is_configured
        && survey.config.is_some()
        && scaled > 0
    {
        let found = format!("{scaled} scaled FP8 weights, no `quantization_config`");
        let expected = "the `quantization_config` of the family";
        return Some(Finding::new(
            Fault::ConfigMissing,
            "config.json",
            found,
            expected,
        ));
    }
    None
}
