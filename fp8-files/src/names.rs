//! Names of layers and tensors: paths, patterns of paths, and hints for misspelled ones.

use glob::Pattern;
use std::fmt;

/// The largest number of names in a hint.
const HINTS: usize = 3;
/// The least similarity of a path in a hint.
const ALIKE: f64 = 0.6;

/// `path.own`, or `own` at the root.
pub fn join(path: &str, own: &str) -> String {
    match path.is_empty() {
        true => own.to_string(),
        false => format!("{path}.{own}"),
    }
}

/// The path of a layer and the tensor's own name, the inverse of [`join`]. A name that begins with a dot has no path.
pub(crate) fn split(name: &str) -> (&str, &str) {
    let parts = name.rsplit_once('.');
    let parts = parts.filter(|(path, _)| !path.is_empty());
    parts.unwrap_or(("", name))
}

/// The name of the weight of the layer at `path`.
pub fn weight_name(path: &str) -> String {
    join(path, "weight")
}

/// A malformed pattern of layer paths.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the path pattern `{pattern}` is not valid: {reason}")]
#[non_exhaustive]
pub struct PatternError {
    /// The pattern.
    pub pattern: String,
    /// What is wrong with it.
    pub reason: String,
}

/// Matches layers by their path: the path itself, or a glob in which `*` matches any characters including dots, `?` one character and
/// `[0-3]` one of a set.
///
/// ```
/// use fp8_files::names::{PathPattern, PatternError};
/// let pattern: PathPattern = "blocks.*.mlp.up".parse()?;
/// assert!(pattern.matches("blocks.11.mlp.up"));
/// assert!(!pattern.matches("blocks.11.mlp.up_proj"));
/// assert!("blocks[.0".parse::<PathPattern>().is_err());
/// # Ok::<(), PatternError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathPattern(Pattern);

impl PathPattern {
    /// Whether it matches the layer at `path`.
    pub fn matches(&self, path: &str) -> bool {
        self.0.as_str() == path || self.0.matches(path)
    }

    /// The pattern as text.
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }
}

impl std::str::FromStr for PathPattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        match Pattern::new(text) {
            Ok(pattern) if !text.is_empty() => Ok(Self(pattern)),
            Ok(_) => Err(PatternError {
                pattern: text.to_string(),
                reason: "it is empty".to_string(),
            }),
            Err(error) => Err(PatternError {
                pattern: text.to_string(),
                reason: format!("{} at character {}", error.msg, error.pos),
            }),
        }
    }
}

impl fmt::Display for PathPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The paths most similar to `text`, as a hint for a pattern that matches nothing: first paths that contain it, then those with a similar
/// spelling.
pub fn near<'a>(text: &str, paths: impl Iterator<Item = &'a str>) -> Vec<String> {
    let plain = text.trim_matches(['*', '.']);
    let likeness = |path: &str| match !plain.is_empty() && path.contains(plain) {
        true => 1.,
        false => strsim::normalized_damerau_levenshtein(text, path),
    };
    let mut scored: Vec<(f64, &str)> = paths.map(|path| (likeness(path), path)).collect();
    scored.retain(|(likeness, _)| *likeness >= ALIKE);
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| a.1.cmp(b.1)));
    scored.dedup_by(|a, b| a.1 == b.1);
    let names = scored.into_iter().take(HINTS);
    names.map(|(_, path)| path.to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typo_finds_the_name() {
        let paths = ["blocks.0.attn.q_proj", "blocks.0.mlp.up", "lm_head"];
        let near = |text| near(text, paths.into_iter());
        assert_eq!(near("lm_haed"), ["lm_head"]);
        assert_eq!(near("blocks.0.attn.qproj"), ["blocks.0.attn.q_proj"]);
        assert_eq!(near("*.mlp"), ["blocks.0.mlp.up"]);
        assert!(near("encoder.conv").is_empty());
    }
}
