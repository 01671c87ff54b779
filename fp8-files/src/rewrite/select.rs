//! Which tensors are weights of linear layers, and which of them are quantized.

use super::source::{Source, is_matrix};
use crate::contents::{Role, role_by_name};
use crate::error::{Error, Result};
use crate::names::PathPattern;
use fancy_regex::Regex;

/// The layer path and role of a matrix called `X.weight`; None of any other tensor.
pub(super) fn role<'a>(source: &dyn Source, name: &'a str) -> Option<(&'a str, Role)> {
    match is_matrix(source, name) {
        true => role_by_name(name),
        false => None,
    }
}

/// Patterns of layer paths: the path itself, a glob, or `re:` and a regular expression from the start.
#[derive(Debug, Default)]
pub(super) struct Patterns(Vec<(String, Pattern, bool)>);

#[derive(Debug)]
enum Pattern {
    Glob(PathPattern),
    Expression(Box<Regex>),
}

impl Patterns {
    pub(super) fn parse(texts: &[String]) -> Result<Self> {
        let parse = |text: &String| {
            let pattern = match text.strip_prefix("re:") {
                None => Pattern::Glob(text.parse()?),
                // As compressed-tensors has it: from the start, with no demand on the end.
                Some(expression) => {
                    let expression = Regex::new(&format!("^(?:{expression})"));
                    let expression = expression.map_err(|error| crate::names::PatternError {
                        pattern: text.clone(),
                        reason: error.to_string(),
                    })?;
                    Pattern::Expression(Box::new(expression))
                }
            };
            Ok((text.clone(), pattern, false))
        };
        Ok(Self(texts.iter().map(parse).collect::<Result<_>>()?))
    }

    /// Whether any of them names the layer at `path`.
    pub(super) fn matches(&mut self, path: &str) -> Result<bool> {
        let mut found = false;
        for (text, pattern, met) in &mut self.0 {
            let matches = match pattern {
                Pattern::Glob(pattern) => pattern.matches(path),
                Pattern::Expression(expression) => {
                    // A pattern that tries too many ways to match gives up.
                    expression.is_match(path).map_err(|error| Error::Pattern {
                        pattern: text.clone(),
                        layer: path.to_string(),
                        reason: error.to_string(),
                    })?
                }
            };
            *met |= matches;
            found |= matches;
        }
        Ok(found)
    }

    /// Those that have met nothing.
    pub(super) fn unmatched(&self) -> Vec<String> {
        let unmatched = self.0.iter().filter(|(_, _, met)| !met);
        unmatched.map(|(text, _, _)| text.clone()).collect()
    }
}
