//! Entries of `generation_config.json` that choose tokens in transformers and have no effect here.

use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// An entry, and the number that means nothing to transformers either.
type Entry = (&'static str, f64);

/// Those that apply where tokens are drawn.
const OF_DRAWS: [Entry; 5] = [
    ("min_p", 0.),
    ("top_h", 0.),
    ("typical_p", 1.),
    ("epsilon_cutoff", 0.),
    ("eta_cutoff", 0.),
];

/// Those that apply in any case. Of lists only an empty one means nothing.
const OF_ALL: [Entry; 16] = [
    ("no_repeat_ngram_size", 0.),
    ("suppress_tokens", f64::NAN),
    ("begin_suppress_tokens", f64::NAN),
    ("bad_words_ids", f64::NAN),
    ("sequence_bias", f64::NAN),
    ("forced_bos_token_id", f64::NAN),
    ("forced_eos_token_id", f64::NAN),
    ("exponential_decay_length_penalty", f64::NAN),
    ("min_length", 0.),
    ("min_new_tokens", 0.),
    ("num_beams", 1.),
    ("penalty_alpha", 0.),
    ("guidance_scale", 1.),
    ("diversity_penalty", 0.),
    ("max_time", f64::NAN),
    // A number of tokens with those of the prompt, where there is no number of new ones.
    ("max_length", 20.),
];

/// Names of the entries of `json` that would change tokens in transformers. `draws`: whether tokens are drawn.
fn unused(json: &Value, draws: bool) -> Vec<&'static str> {
    let of_draws = OF_DRAWS.iter().filter(|_| draws);
    let names = of_draws.chain(&OF_ALL).filter_map(|(name, nothing)| {
        if *name == "max_length" && json.get("max_new_tokens").is_some_and(|new| !new.is_null()) {
            return None;
        }
        let has_effect = match json.get(name)? {
            Value::Null | Value::Bool(false) => false,
            Value::Number(number) => number.as_f64() != Some(*nothing),
            Value::Array(list) => !list.is_empty(),
            Value::Object(entries) => !entries.is_empty(),
            Value::Bool(true) | Value::String(_) => true,
        };
        has_effect.then_some(*name)
    });
    names.collect()
}

/// Warns of such entries, once for each file.
pub(super) fn warn(json: &Value, draws: bool, path: &Path) {
    static SAID: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    let unused = unused(json, draws);
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if !unused.is_empty() && said.insert(path.to_path_buf()) {
        crate::warn(&format!(
            "{}: {} no effect here, so texts may differ from those of transformers",
            path.display(),
            match unused.as_slice() {
                [name] => format!("{name} has"),
                names => format!("{} have", names.join(", ")),
            }
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_entries_with_an_effect_are_named() {
        let nothing = json!({
            "do_sample": true, "temperature": 0.6, "top_k": 20, "min_p": 0.0, "typical_p": 1.0, "no_repeat_ngram_size": 0,
            "suppress_tokens": [], "begin_suppress_tokens": null, "num_beams": 1, "min_length": 0, "min_p_": 0.5,
        });
        assert!(unused(&nothing, true).is_empty());
        let some = json!({ "min_p": 0.05, "no_repeat_ngram_size": 3, "suppress_tokens": [7], "forced_eos_token_id": 2 });
        let always = [
            "no_repeat_ngram_size",
            "suppress_tokens",
            "forced_eos_token_id",
        ];
        assert_eq!(unused(&some, false), always);
        assert_eq!(unused(&some, true), [&["min_p"], &always[..]].concat());
        let mut lengths = json!({ "max_length": 4096, "max_time": 2.5 });
        assert_eq!(unused(&lengths, true), ["max_time", "max_length"]);
        lengths["max_new_tokens"] = 64.into();
        assert_eq!(unused(&lengths, true), ["max_time"]);
    }
}
