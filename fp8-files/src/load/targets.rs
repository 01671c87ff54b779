//! Patterns of layers in a configuration: exact paths, regular expressions and class names.

use super::at::At;
use crate::error::{Error, Result};
use fancy_regex::Regex;

/// The class that stands for every layer of this library.
const CLASS: &str = "Linear";

/// How exactly a pattern matches a layer. The most exact match decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rank {
    /// All layers of the class.
    Class,
    /// `re:` and a regular expression, anchored at the start of the path.
    Expression,
    /// The path itself.
    Exact,
}

/// A list of patterns.
#[derive(Debug, Default)]
pub(super) struct Targets {
    exact: Vec<String>,
    expressions: Vec<Regex>,
}

impl Targets {
    pub(super) fn parse(at: &At<'_>) -> Result<Self> {
        let mut targets = Self::default();
        for text in at.texts()? {
            match text.strip_prefix("re:") {
                None => targets.exact.push(text.to_string()),
                Some(pattern) => targets.expressions.push(at.pattern(pattern)?),
            }
        }
        Ok(targets)
    }

    /// How exactly these patterns match the layer at `path`; None if none does.
    pub(super) fn rank(&self, path: &str) -> Result<Option<Rank>> {
        if self.exact.iter().any(|exact| exact == path) {
            return Ok(Some(Rank::Exact));
        }
        for expression in &self.expressions {
            // Matching fails at the backtracking limit.
            let found = expression.is_match(path).map_err(|error| Error::Pattern {
                pattern: expression.as_str().to_string(),
                layer: path.to_string(),
                reason: error.to_string(),
            })?;
            if found {
                return Ok(Some(Rank::Expression));
            }
        }
        let class = |name: &String| name.eq_ignore_ascii_case(CLASS);
        Ok(self.exact.iter().any(class).then_some(Rank::Class))
    }
}
