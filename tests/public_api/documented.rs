//! Which items have an example in their own documentation, and the ceilings of those that have none.

use crate::listing::{Entry, Kind};
use std::collections::BTreeMap;
use syn::{Attribute, Expr, Lit, Meta};

/// Crate and kind to the largest count that is allowed.
pub type Ceilings = BTreeMap<(String, String), usize>;

/// Marks of a code block that is Rust and is at least compiled.
const COMPILED: [&str; 6] = [
    "",
    "rust",
    "no_run",
    "should_panic",
    "compile_fail",
    "edition2024",
];

/// Whether the documentation has a code block that rustdoc compiles.
pub fn has_example(attributes: &[Attribute]) -> bool {
    let mut open = false;
    for line in attributes.iter().filter_map(doc_line) {
        for line in line.lines() {
            let Some(marks) = line.trim().strip_prefix("```") else {
                continue;
            };
            if !open && marks.split(',').all(|mark| COMPILED.contains(&mark.trim())) {
                return true;
            }
            open = !open;
        }
    }
    false
}

fn doc_line(attribute: &Attribute) -> Option<String> {
    match &attribute.meta {
        Meta::NameValue(meta) if meta.path.is_ident("doc") => match &meta.value {
            Expr::Lit(literal) => match &literal.lit {
                Lit::Str(text) => Some(text.value()),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    }
}

/// The items of each kind that have none. Setters (`with_..`) are not counted: the example of their type shows how such are
/// used.
pub fn without_example(entries: &[Entry]) -> Vec<(&'static str, Vec<String>)> {
    Kind::ALL
        .iter()
        .map(|&kind| {
            let without = entries
                .iter()
                .filter(|e| e.kind == Some(kind) && !e.example)
                .filter(|e| {
                    !e.path
                        .rsplit("::")
                        .next()
                        .unwrap_or("")
                        .starts_with("with_")
                });
            (kind.name(), without.map(|e| e.path.clone()).collect())
        })
        .collect()
}

/// # Errors
/// If a line is not `crate kind count`.
pub fn parse(text: &str) -> Result<Ceilings, String> {
    let mut ceilings = Ceilings::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [name, kind, count] = words[..] else {
            return Err(format!("`{line}` is not `crate kind count`"));
        };
        let count = count
            .parse()
            .map_err(|_| format!("`{line}` has no count"))?;
        ceilings.insert((name.into(), kind.into()), count);
    }
    Ok(ceilings)
}

pub fn print(ceilings: &Ceilings) -> String {
    let mut text = String::from(
        "# Public items whose own documentation has no example. These counts may only fall.\n",
    );
    for ((name, kind), count) in ceilings {
        text += &format!("{name} {kind} {count}\n");
    }
    text
}
