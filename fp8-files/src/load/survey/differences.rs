//! Where the two configuration files of ModelOpt, `config.json` and its own, contradict each other. Engines read one or the other.

use crate::load::at::At;
use crate::load::config;
use crate::load::families::{MODELOPT_EXCLUDED, modelopt_entries};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// An entry that the two files have, with other contents.
pub(crate) struct Difference {
    /// The entry of ModelOpt's own file.
    pub(crate) key: String,
    /// What that file says.
    pub(crate) found: String,
    /// What `config.json` says.
    pub(crate) expected: String,
}

/// All differences of the files in `directory`; `model` is its `config.json`.
pub(super) fn of(directory: &Path, model: Option<&Value>) -> Vec<Difference> {
    let (path, second_path) = (
        directory.join("config.json"),
        directory.join(config::SECOND),
    );
    let first = model.and_then(|model| config::quantization(&path, model));
    // A malformed file is an error of the configuration, if it is needed.
    let (Some(first), Ok(Some(second))) = (first, config::json(&second_path)) else {
        return vec![];
    };
    let first = modelopt_entries(&first);
    let second = modelopt_entries(&At::new(&second_path, "", &second));
    let found = [
        algorithms(&first, &second),
        layers(&first, &second),
        excluded(&first, &second),
    ];
    found.into_iter().flatten().collect()
}

/// The algorithm that an entry names, in capitals.
fn algo(at: &At<'_>) -> Option<String> {
    let name = at.get("quant_algo").value.as_str();
    name.map(str::to_ascii_uppercase)
}

fn algorithms(first: &At<'_>, second: &At<'_>) -> Option<Difference> {
    let (expected, found) = (algo(first)?, algo(second)?);
    (expected != found).then(|| Difference {
        key: second.get("quant_algo").key,
        found,
        expected,
    })
}

/// The first layer of a mixture to which the lists give other algorithms.
fn layers(first: &At<'_>, second: &At<'_>) -> Option<Difference> {
    let lists = [first, second].map(|at| at.get("quantized_layers"));
    let [Some(one), Some(other)] = [&lists[0], &lists[1]].map(|list| list.value.as_object()) else {
        return None;
    };
    let paths: BTreeSet<&String> = one.keys().chain(other.keys()).collect();
    let of =
        |at: &At<'_>, path: &str| algo(&at.get(path)).unwrap_or_else(|| "no such layer".into());
    let mut differing = paths
        .into_iter()
        .filter(|path| of(&lists[0], path) != of(&lists[1], path));
    let path = differing.next()?;
    Some(Difference {
        key: lists[1].key.clone(),
        found: with_more(of(&lists[1], path), path, differing.count()),
        expected: of(&lists[0], path),
    })
}

/// The first module that only one of the lists of modules in high precision names.
fn excluded(first: &At<'_>, second: &At<'_>) -> Option<Difference> {
    let list = |at: &At<'_>| {
        let mut lists = MODELOPT_EXCLUDED.iter().map(|key| at.get(key));
        let list = lists.find(|list| list.value.is_array())?;
        let names: BTreeSet<String> = list.texts().ok()?.into_iter().map(String::from).collect();
        Some((list.key, names))
    };
    let ((_, one), (key, other)) = (list(first)?, list(second)?);
    let mut differing = one.symmetric_difference(&other);
    let name = differing.next()?;
    let text = |list: &BTreeSet<String>| match list.contains(name) {
        true => "listed",
        false => "not listed",
    };
    let expected = text(&one).to_string();
    let found = with_more(text(&other).to_string(), name, differing.count());
    Some(Difference {
        key,
        found,
        expected,
    })
}

/// What is said of the first, and how many others differ.
fn with_more(said: String, name: &str, more: usize) -> String {
    match more {
        0 => format!("`{name}`: {said}"),
        _ => format!("`{name}`: {said}, and {more} more"),
    }
}
