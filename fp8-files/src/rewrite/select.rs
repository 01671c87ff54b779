//! Selects the tensors that are weights of linear layers, and the layers to quantize.

use super::source::{Source, is_matrix, natural_order};
use crate::check::is_float;
use crate::contents::{Contents, HEAD, Role, role_by_name};
use crate::error::{Error, Result};
use crate::names::{PathPattern, PatternError};
use fancy_regex::Regex;

/// The layer path and role of a matrix called `X.weight`; None for any other tensor.
pub(super) fn role<'a>(source: &dyn Source, name: &'a str) -> Option<(&'a str, Role)> {
    match is_matrix(source, name) {
        true => role_by_name(name),
        false => None,
    }
}

/// The layer of experts whose weights this tensor holds, those of each in a matrix of `[experts, .., ..]`; None for any other tensor.
fn experts(source: &dyn Source, name: &str) -> Option<String> {
    let float = source.dtype(name).is_none_or(is_float);
    let dims = source.shape(name).filter(|dims| float && dims.len() == 3);
    let (path, _) = dims.and_then(|_| name.split_once(".experts."))?;
    Some(format!("{path}.experts"))
}

/// Adds the linear layers in high precision and the embeddings among `others` to `contents`.
pub(super) fn name_others(source: &dyn Source, others: &[String], contents: &mut Contents) {
    for name in others {
        match role(source, name) {
            Some((path, Role::Embedding)) => contents.embeddings.push(path.to_string()),
            Some((path, _)) => contents.ignored.push(path.to_string()),
            None => {
                let path = experts(source, name).filter(|path| !contents.ignored.contains(path));
                contents.ignored.extend(path);
            }
        }
    }
    contents.name_absent_layers();
    // A tied head has no tensor, but the model has the layer, which every list of ignored layers has to name.
    if !contents.has_head() {
        contents.ignored.push(HEAD.to_string());
    }
    contents
        .ignored
        .sort_by_cached_key(|path| natural_order(path));
}

/// Patterns of layer paths: the path itself, a glob, or `re:` and a regular expression anchored at the start. The flag tells whether a
/// pattern has matched a layer.
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
                // As in compressed-tensors: anchored at the start, with any end.
                Some(expression) => {
                    let expression = Regex::new(&format!("^(?:{expression})"));
                    let expression = expression.map_err(|error| PatternError {
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

    /// Whether any of them matches the layer at `path`.
    pub(super) fn matches(&mut self, path: &str) -> Result<bool> {
        let mut found = false;
        for (text, pattern, matched) in &mut self.0 {
            let matches = match pattern {
                Pattern::Glob(pattern) => pattern.matches(path),
                Pattern::Expression(expression) => {
                    // Matching fails at the backtracking limit.
                    expression.is_match(path).map_err(|error| Error::Pattern {
                        pattern: text.clone(),
                        layer: path.to_string(),
                        reason: error.to_string(),
                    })?
                }
            };
            *matched |= matches;
            found |= matches;
        }
        Ok(found)
    }

    /// The patterns that have matched no layer.
    pub(super) fn unmatched(&self) -> Vec<String> {
        let unmatched = self.0.iter().filter(|(_, _, matched)| !matched);
        unmatched.map(|(text, _, _)| text.clone()).collect()
    }
}
