//! Which tensors are weights of linear layers, and which of them are quantized.

use super::kind::is_head;
use super::source::{Source, is_matrix};
use crate::config::PathPattern;
use crate::error::{Error, Result};
use fancy_regex::Regex;

/// What a matrix called `X.weight` is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Linear,
    Head,
    /// Chooses experts: tiny and sensitive.
    Router,
    Embedding,
}

/// The layer path and role of a matrix called `X.weight`; None of any other tensor.
pub(super) fn role<'a>(source: &dyn Source, name: &'a str) -> Option<(&'a str, Role)> {
    match is_matrix(source, name) {
        true => role_by_name(name),
        false => None,
    }
}

/// The same of a matrix.
pub(crate) fn role_by_name(name: &str) -> Option<(&str, Role)> {
    const EMBEDDINGS: [&str; 5] = ["wte", "wpe", "shared", "relative_attention_bias", "tok"];
    const ROUTERS: [&str; 4] = ["gate", "router", "shared_expert_gate", "classifier_gate"];
    let path = name.strip_suffix(".weight")?;
    if path.is_empty() {
        return None;
    }
    let own = path.rsplit('.').next().unwrap_or(path);
    let role = if own.contains("embed") || EMBEDDINGS.contains(&own) {
        Role::Embedding
    } else if own.contains("norm") {
        // No norm has a matrix; whatever this is, it is left alone.
        Role::Embedding
    } else if ROUTERS.contains(&own) || own.ends_with("_router") {
        Role::Router
    } else if is_head(path) {
        Role::Head
    } else {
        Role::Linear
    };
    Some((path, role))
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
                    let expression =
                        expression.map_err(|error| crate::config::ConfigError::Pattern {
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
