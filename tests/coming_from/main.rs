//! `docs/coming_from.md`: every name of this library in its tables is compiled here.

#[allow(unused, reason = "names are compiled, not run")]
mod configurations;
#[allow(unused, reason = "names are compiled, not run")]
mod parts;

use fp8::RecipeName;
use std::collections::BTreeSet;

type Done = Result<(), Box<dyn std::error::Error>>;

/// Names of variables in the examples, and words that are not names of this library.
const OTHER_WORDS: &str = "A f c m n k q v g r s x y te opt mut let fn true false Some None vb key \
    bound calibration every filter_fqns group options pattern path operand method scaled_inputs \
    Cargo toml tracing _l1 _l2 layer role l1 l2 stochastic";

/// The words of Rust text.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let inside = |c: char| c.is_alphanumeric() || c == '_';
    let words = text.split(move |c: char| !inside(c));
    words.filter(|word| word.starts_with(|c: char| c.is_alphabetic() || c == '_'))
}

/// The code spans of the columns that say what to write here.
fn spans() -> Vec<String> {
    let page = include_str!("../../docs/coming_from.md");
    let mut spans = vec![];
    let mut column = 2;
    for line in page.lines().filter(|line| line.starts_with('|')) {
        // A bar within a cell is escaped.
        let line = line.replace("\\|", "¦");
        let cells: Vec<&str> = line.split('|').collect();
        if let Some(at) = cells.iter().position(|cell| cell.trim() == "ours") {
            column = at;
        }
        let inside = cells
            .get(column)
            .unwrap_or(&"")
            .split('`')
            .skip(1)
            .step_by(2);
        // Quoted text is a value.
        spans.extend(inside.map(|span| span.split('"').step_by(2).collect()));
    }
    spans
}

#[test]
fn every_name_of_the_page_is_compiled() {
    let source = [include_str!("configurations.rs"), include_str!("parts.rs")].concat();
    let trait_paths = source.replace('>', "");
    let code: BTreeSet<&str> = words(&source).chain(words(OTHER_WORDS)).collect();
    // Recipes by name are values.
    let recipes = RecipeName::ALL.map(|name| name.as_str());
    let mut missing = BTreeSet::new();
    let spans = spans();
    assert!(spans.len() > 400, "only {} code spans", spans.len());
    for span in spans {
        if !recipes.contains(&span.as_str()) {
            missing.extend(
                words(&span)
                    .filter(|word| !code.contains(word))
                    .map(str::to_string),
            );
        }
        // `Type::name` as written, or as a field of a pattern.
        for (at, _) in span.match_indices("::") {
            let owner = words(&span[..at]).last().unwrap_or("");
            let name = words(&span[at..]).next().unwrap_or("");
            // `<Type as Trait>::name` too.
            let literal = format!("{owner}::{name}");
            let literal = source.contains(&literal) || trait_paths.contains(&literal);
            let opening = format!("{owner} {{");
            let mut patterns = source.match_indices(opening.as_str()).map(|(at, _)| {
                let pattern = &source[at..];
                &pattern[..pattern.find('}').unwrap_or(0)]
            });
            let field = patterns.any(|pattern| words(pattern).any(|word| word == name));
            let starts = span[at..].starts_with("::{") || span[at..].starts_with("::<");
            if !literal && !field && !starts {
                missing.insert(format!("{owner}::{name}"));
            }
        }
    }
    assert!(
        missing.is_empty(),
        "{missing:?} of docs/coming_from.md are not in this file"
    );
}
