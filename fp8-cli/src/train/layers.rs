//! Which layers a run computes in FP8, in a few lines.

use fp8::{Note, Outcome, PrepareReport};
use std::collections::BTreeMap;

/// How many layers of a kind are named.
const NAMED: usize = 3;

/// The layers of a run by what happens to them; `recipe` is that of all layers without one of their own.
pub fn described(report: &PrepareReport, recipe: &str) -> String {
    let mut fp8: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    let mut high: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for layer in &report.layers {
        let path = layer.path.as_deref().unwrap_or("a layer without a name");
        match &layer.outcome {
            Outcome::Converted(notes) => {
                let own = notes.iter().find_map(|note| match note {
                    Note::OwnRecipe(own) => Some(own.to_string()),
                    _ => None,
                });
                fp8.entry(own.unwrap_or_else(|| recipe.to_string()))
                    .or_default()
                    .push(path);
            }
            Outcome::Skipped(reason) => high.entry(reason.to_string()).or_default().push(path),
            _ => {}
        }
    }
    let mut lines = vec![];
    for (recipe, paths) in &fp8 {
        let names = match fp8.len() {
            1 => String::new(),
            _ => format!(": {}", named(paths)),
        };
        lines.push(format!("{} in FP8 by {recipe}{names}", counted(paths)));
    }
    for (reason, paths) in &high {
        let (count, names) = (counted(paths), named(paths));
        lines.push(format!("{count} in high precision, {reason}: {names}"));
    }
    lines.extend(
        report
            .warnings
            .iter()
            .map(|warning| format!("warning: {warning}")),
    );
    lines.join("\n")
}

fn counted(paths: &[&str]) -> String {
    match paths {
        [_] => "1 layer".to_string(),
        _ => format!("{} layers", paths.len()),
    }
}

/// The first of some paths.
fn named(paths: &[&str]) -> String {
    let shown = paths
        .iter()
        .take(NAMED)
        .copied()
        .collect::<Vec<_>>()
        .join(", ");
    match paths.len() > NAMED {
        true => format!("{shown}, .."),
        false => shown,
    }
}
