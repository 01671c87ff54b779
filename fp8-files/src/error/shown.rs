//! Parts of messages.

use std::path::PathBuf;

/// The end of a message about a file, if it is known.
pub(super) fn in_file(path: &Option<PathBuf>) -> String {
    path.as_ref()
        .map(|path| format!(", in {}", path.display()))
        .unwrap_or_default()
}

/// The first few names of each side.
pub(super) fn unmatched(missing: &[String], unused: &[String]) -> String {
    const SHOWN: usize = 5;
    let list = |names: &[String], what: &str| {
        let shown = names.iter().take(SHOWN).map(|name| format!("`{name}`"));
        let shown = shown.collect::<Vec<_>>().join(", ");
        match names.len() {
            0 => None,
            1..=SHOWN => Some(format!("{shown} {what}")),
            count => Some(format!("{shown} and {} more {what}", count - SHOWN)),
        }
    };
    let sides = [
        list(missing, "not in the checkpoint"),
        list(unused, "in no variable"),
    ];
    let sides: Vec<String> = sides.into_iter().flatten().collect();
    sides.join("; ")
}
