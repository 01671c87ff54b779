//! Real models from a directory that an environment variable names.

use fp8_test_support::skipped;
use std::path::PathBuf;

/// The directory of such models: `smollm2/` has a GGUF file, `minilm/` the files of a directory.
pub const VARIABLE: &str = "FP8_MODELS";

/// The first file with this extension in the folder `name` of the models; says so where there is none.
pub fn real_model(name: &str, extension: &str) -> Option<PathBuf> {
    let dir = real_dir(name)?;
    let mut files: Vec<PathBuf> = std::fs::read_dir(&dir)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .collect();
    files.sort();
    let first = files.into_iter().next();
    if first.is_none() {
        skipped(&format!("no .{extension} file in {}", dir.display()));
    }
    first
}

/// The folder `name` of the models; says so where there is none.
pub fn real_dir(name: &str) -> Option<PathBuf> {
    let dir = match std::env::var_os(VARIABLE) {
        Some(dir) => PathBuf::from(dir).join(name),
        None => {
            skipped(&format!("{VARIABLE} names no directory with `{name}`"));
            return None;
        }
    };
    if !dir.is_dir() {
        skipped(&format!("{} is not a directory", dir.display()));
        return None;
    }
    Some(dir)
}
