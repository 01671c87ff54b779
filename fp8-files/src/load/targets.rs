//! Which layers a configuration means: exact paths, regular expressions and class names.

use super::family::At;
use crate::error::{Error, Result};
use fancy_regex::Regex;

/// The class that every layer of this library stands for.
const CLASS: &str = "Linear";

/// How exactly a pattern names a layer; the most exact one counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rank {
    /// All layers of the class.
    Class,
    /// `re:` and a regular expression, from the start of the path.
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
                Some(pattern) => {
                    // Python's `re.match`: from the start, with no demand on the end.
                    let expression = Regex::new(&format!("^(?:{pattern})"))
                        .map_err(|error| at.unsupported(&format!("a pattern ({error})")))?;
                    targets.expressions.push(expression);
                }
            }
        }
        Ok(targets)
    }

    /// How exactly these patterns name the layer at `path`; None if they do not.
    pub(super) fn rank(&self, path: &str) -> Result<Option<Rank>> {
        if self.exact.iter().any(|exact| exact == path) {
            return Ok(Some(Rank::Exact));
        }
        for expression in &self.expressions {
            // A pattern that tries too many ways to match gives up.
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
