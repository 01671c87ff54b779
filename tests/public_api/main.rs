//! The public API of the crates, item by item, against the lists in this folder; and how many items have no example.
//!
//! The lists are made from the sources: modules, re-exports, and macros that make items are followed. A changed API fails
//! here until its list is written again, so that every change of it is seen in review.

mod documented;
mod expand;
mod listing;
mod paths;
mod render;
mod signature;
mod source;
mod walker;

use listing::{Entry, list};
use source::Source;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const UPDATE: &str = "FP8_UPDATE_SNAPSHOTS";
const HOW_TO_UPDATE: &str = "FP8_UPDATE_SNAPSHOTS=1 cargo test --test public_api";

/// The crates and their roots.
const CRATES: [(&str, &str); 4] = [
    ("fp8", "src/lib.rs"),
    ("fp8_core", "fp8-core/src/lib.rs"),
    ("fp8_candle", "fp8-candle/src/lib.rs"),
    ("fp8_recipes", "fp8-recipes/src/lib.rs"),
];

fn updating() -> bool {
    std::env::var_os(UPDATE).is_some_and(|value| value == "1")
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A file of this folder.
fn recorded(name: &str) -> PathBuf {
    root().join("tests/public_api").join(name)
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

fn entries(name: &str, file: &str) -> Result<Vec<Entry>, String> {
    Ok(list(&Source::read(name, &root().join(file))?))
}

/// The lines that only one of two lists has, marked `-` (only recorded) and `+` (only in the sources).
fn differences(recorded: &str, now: &[Entry]) -> Vec<String> {
    let before: BTreeSet<&str> = recorded.lines().collect();
    let after: BTreeSet<&str> = now.iter().map(|entry| entry.line.as_str()).collect();
    let gone = recorded.lines().filter(|line| !after.contains(line));
    let gone = gone.map(|line| format!("- {line}"));
    let new = now.iter().filter(|entry| !before.contains(&*entry.line));
    let new = new.map(|entry| format!("+ {}", entry.line));
    gone.chain(new).collect()
}

#[test]
fn the_public_api_is_the_recorded_one() -> Result<(), String> {
    let mut report = String::new();
    for (name, file) in CRATES {
        let now = entries(name, file)?;
        let path = recorded(&format!("{name}.txt"));
        if updating() {
            let lines: Vec<&str> = now.iter().map(|entry| entry.line.as_str()).collect();
            write(&path, &(lines.join("\n") + "\n"))?;
            continue;
        }
        // A list that is not there yet is empty.
        let before = fs::read_to_string(&path).unwrap_or_default();
        let differences = differences(&before, &now);
        if !differences.is_empty() {
            report += &format!("{name}:\n  {}\n", differences.join("\n  "));
        }
    }
    if report.is_empty() {
        return Ok(());
    }
    println!("{report}");
    Err(format!(
        "the public API is not the recorded one (see above). If that is meant: {HOW_TO_UPDATE}"
    ))
}

#[test]
fn no_more_items_than_before_lack_an_example() -> Result<(), String> {
    let path = recorded("without_example.txt");
    let before = documented::parse(&fs::read_to_string(&path).unwrap_or_default())
        .map_err(|error| format!("{}: {error}", path.display()))?;
    let mut ceilings = documented::Ceilings::new();
    let mut report = String::new();
    for (name, file) in CRATES {
        let now = entries(name, file)?;
        for (kind, without) in documented::without_example(&now) {
            let key = (name.to_string(), kind.to_string());
            let count = without.len();
            let ceiling = before.get(&key).copied();
            if ceiling.is_some_and(|ceiling| count > ceiling) {
                let ceiling = ceiling.unwrap_or_default();
                let list = without.join("\n  ");
                report += &format!(
                    "{name}: {count} {kind} without an example, at most {ceiling} are allowed. One of these needs one:\n  {list}\n"
                );
            } else if ceiling != Some(count) && !updating() {
                report += &format!(
                    "{name}: {count} {kind} without an example, so the ceiling can be lowered: {HOW_TO_UPDATE}\n"
                );
            }
            // A ceiling never rises here; whoever must raise one edits the file.
            ceilings.insert(key, ceiling.unwrap_or(count).min(count));
        }
    }
    if updating() {
        write(&path, &documented::print(&ceilings))?;
    }
    if report.is_empty() {
        return Ok(());
    }
    println!("{report}");
    Err("items without an example (see above)".into())
}
