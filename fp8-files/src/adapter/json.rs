//! `adapter_config.json`, as PEFT 0.21 writes it.

use super::config::AdapterConfig;
use super::targets::{ALL_LINEAR, Targets};
use crate::error::{Error, Result};
use crate::load::at::At;
use crate::python_json;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Entries of other kinds of adapters, and the values that turn them off.
const OFF: &[&str] = &[
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "layer_replication",
    "megatron_config",
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "fan_in_fan_out",
    "velora_config",
    "kasa_config",
    "monteclora_config",
    "arrow_config",
];

/// Entries that [`parse`] reads.
const READ: &[&str] = &[
    "peft_type",
    "bias",
    "init_lora_weights",
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "exclude_modules",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layers_pattern",
    "base_model_name_or_path",
    "task_type",
    "modules_to_save",
];

/// Entries that say how an adapter was made, and settings of kinds that [`OFF`] refuses.
const WITHOUT_EFFECT: &[&str] = &[
    "auto_mapping",
    "inference_mode",
    "revision",
    "peft_version",
    "megatron_core",
    "qalora_group_size",
    "ensure_weight_tying",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "runtime_config",
];

/// Whether a value turns its entry off.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(entries) => entries.is_empty(),
        _ => false,
    }
}

/// Reads the configuration in the file at `path`.
pub(super) fn parse(path: &Path, text: &str) -> Result<AdapterConfig> {
    let value = python_json::parse(text)
        .map_err(|error| Error::json(path, "the configuration of the adapter", error))?;
    let root = At::new(path, "", &value);
    let kind = root.get("peft_type");
    if kind.value != "LORA" {
        return Err(kind.unsupported("\"LORA\""));
    }
    for key in OFF {
        let entry = root.get(key);
        if !is_off(entry.value) {
            return Err(entry.unsupported("null or false"));
        }
    }
    let known = |name: &str| READ.contains(&name) || WITHOUT_EFFECT.contains(&name);
    for (name, entry) in root.entries()? {
        if !known(name) && !is_off(entry.value) {
            let expected = "null or no such entry: it may change what the adapter computes, in a way that is not known here";
            return Err(entry.unsupported(expected));
        }
    }
    let bias = root.get("bias");
    if !bias.is_null() && bias.value != "none" {
        return Err(bias.unsupported("\"none\""));
    }
    // Other initializations change the base as well.
    let init = root.get("init_lora_weights");
    let harmless = ["gaussian", "eva", "orthogonal"];
    if init
        .value
        .as_str()
        .is_some_and(|way| !harmless.contains(&way))
    {
        return Err(init.unsupported("true, false, \"gaussian\", \"eva\" or \"orthogonal\""));
    }
    let rank = match root.get("r") {
        entry if entry.is_null() => 8, // PEFT's default
        entry => entry.count()?,
    };
    let target_modules = root.get("target_modules");
    Ok(AdapterConfig {
        rank,
        alpha: number(&root.get("lora_alpha"))?.unwrap_or(8.),
        dropout: dropout(&root.get("lora_dropout"))?,
        targets: targets(&target_modules)?
            .ok_or_else(|| target_modules.unsupported("a text or a list of names"))?,
        exclude: targets(&root.get("exclude_modules"))?,
        rslora: flag(&root.get("use_rslora"))?,
        rank_pattern: pattern(&root.get("rank_pattern"), |entry| entry.count())?,
        alpha_pattern: pattern(&root.get("alpha_pattern"), |entry| {
            number(entry)?.ok_or_else(|| entry.unsupported("a number"))
        })?,
        layers: layers(&root.get("layers_to_transform"))?,
        layers_pattern: match root.get("layers_pattern") {
            entry if entry.value.is_string() => vec![entry.text("a text")?.to_string()],
            entry => owned(entry.texts()?),
        },
        base_model: text_of(&root.get("base_model_name_or_path"))?,
        task: text_of(&root.get("task_type"))?,
        saved: owned(root.get("modules_to_save").texts()?),
        labels: vec![],
    })
}

fn owned(texts: Vec<&str>) -> Vec<String> {
    texts.into_iter().map(String::from).collect()
}

/// A text; None for null.
fn text_of(entry: &At<'_>) -> Result<Option<String>> {
    match entry.is_null() {
        true => Ok(None),
        false => Ok(Some(entry.text("null or a text")?.to_string())),
    }
}

fn flag(entry: &At<'_>) -> Result<bool> {
    match entry.value {
        Value::Null => Ok(false),
        Value::Bool(flag) => Ok(*flag),
        _ => Err(entry.unsupported("true or false")),
    }
}

/// A finite number; None for null.
fn number(entry: &At<'_>) -> Result<Option<f64>> {
    if entry.is_null() {
        return Ok(None);
    }
    let number = entry.value.as_f64().filter(|number| number.is_finite());
    number
        .map(Some)
        .ok_or_else(|| entry.unsupported("a number"))
}

fn dropout(entry: &At<'_>) -> Result<f32> {
    let share = number(entry)?.unwrap_or(0.);
    match (0.0..1.0).contains(&share) {
        true => Ok(share as f32),
        false => Err(entry.unsupported("a probability of at least 0 and below 1")),
    }
}

/// Names, an expression or `all-linear`; None for null.
fn targets(entry: &At<'_>) -> Result<Option<Targets>> {
    match entry.value {
        Value::Null => Ok(None),
        Value::String(text) if text.eq_ignore_ascii_case(ALL_LINEAR) => {
            Ok(Some(Targets::AllLinear))
        }
        Value::String(text) => Ok(Some(Targets::Expression(text.clone()))),
        _ => Ok(Some(Targets::Names(owned(entry.texts()?)))),
    }
}

fn pattern<T>(entry: &At<'_>, read: impl Fn(&At<'_>) -> Result<T>) -> Result<BTreeMap<String, T>> {
    let entries = entry.entries()?.into_iter();
    let entries = entries.map(|(name, entry)| Ok((name.to_string(), read(&entry)?)));
    entries.collect()
}

/// A number of a layer or a list of them; None for null.
fn layers(entry: &At<'_>) -> Result<Option<Vec<usize>>> {
    let number = |value: &Value| value.as_u64().and_then(|number| number.try_into().ok());
    let numbers: Option<Vec<usize>> = match entry.value {
        Value::Null => return Ok(None),
        Value::Array(items) => items.iter().map(number).collect(),
        value => number(value).map(|number| vec![number]),
    };
    numbers
        .map(Some)
        .ok_or_else(|| entry.unsupported("a number of a layer or a list of them"))
}

/// A number without a point where it is whole, as most alphas are.
fn whole(number: f64) -> Value {
    match number as i64 {
        integer if integer as f64 == number => json!(integer),
        _ => json!(number),
    }
}

/// The configuration of an adapter that is no longer trained.
pub(super) fn written(config: &AdapterConfig) -> Value {
    let targets = |targets: &Targets| match targets {
        Targets::Names(names) => json!(names),
        Targets::Expression(text) => json!(text),
        Targets::AllLinear => json!(ALL_LINEAR),
    };
    let layers_pattern = match config.layers_pattern.is_empty() {
        true => Value::Null,
        false => json!(config.layers_pattern),
    };
    let saved = match config.saved.is_empty() {
        true => Value::Null,
        false => json!(config.saved),
    };
    // The shortest decimal that is the f32.
    let dropout: Value = format!("{:?}", config.dropout)
        .parse()
        .unwrap_or(Value::Null);
    let alphas = config.alpha_pattern.iter();
    let alphas: BTreeMap<_, _> = alphas.map(|(path, alpha)| (path, whole(*alpha))).collect();
    json!({
        "alora_invocation_tokens": null,
        "alpha_pattern": alphas,
        "auto_mapping": null,
        "base_model_name_or_path": config.base_model,
        "bias": "none",
        "exclude_modules": config.exclude.as_ref().map(targets),
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "layer_replication": null,
        "layers_pattern": layers_pattern,
        "layers_to_transform": config.layers,
        "lora_alpha": whole(config.alpha),
        "lora_bias": false,
        "lora_dropout": dropout,
        "modules_to_save": saved,
        "peft_type": "LORA",
        "r": config.rank,
        "rank_pattern": config.rank_pattern,
        "revision": null,
        "target_modules": targets(&config.targets),
        "target_parameters": null,
        "task_type": config.task,
        "use_dora": false,
        "use_rslora": config.rslora,
    })
}
