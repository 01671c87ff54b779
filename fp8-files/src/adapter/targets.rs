//! Which layers an adapter changes.

use crate::error::{Error, Result};
use crate::names::PatternError;
use fancy_regex::Regex;

/// Linear layers of a model, as PEFT names them.
///
/// ```
/// use fp8_files::adapter::Targets;
/// let path = "model.layers.0.self_attn.q_proj";
/// assert!("q_proj,v_proj".parse::<Targets>()?.matches(path)?); // the last components of paths
/// assert!(!"proj".parse::<Targets>()?.matches(path)?);
/// assert!(r".*layers\.[0-3]\..*_proj".parse::<Targets>()?.matches(path)?); // a regular expression of whole paths
/// assert!(Targets::AllLinear.matches(path)?);
/// # Ok::<(), fp8_files::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Targets {
    /// Layers whose path is one of these names or ends with a dot and one of them.
    Names(Vec<String>),
    /// Layers whose whole path the regular expression matches.
    Expression(String),
    /// All linear layers but the head.
    AllLinear,
}

/// The word for [`Targets::AllLinear`].
pub(super) const ALL_LINEAR: &str = "all-linear";
/// Characters that regular expressions contain, but paths of layers do not.
const OPERATORS: [char; 12] = ['*', '+', '?', '(', ')', '[', ']', '{', '}', '|', '\\', '^'];

impl Targets {
    /// Layers whose paths end with these names.
    pub fn names<S: Into<String>>(names: impl IntoIterator<Item = S>) -> Self {
        Self::Names(names.into_iter().map(Into::into).collect())
    }

    /// Whether the linear layer at `path` is a target.
    ///
    /// # Errors
    /// [`Error::Malformed`] for an expression that is not valid; [`Error::Pattern`] if matching exceeds the limit of backtracking.
    pub fn matches(&self, path: &str) -> Result<bool> {
        match self {
            Self::Names(names) => Ok(names.iter().any(|name| ends_with(path, name))),
            Self::Expression(expression) => whole(expression, path),
            Self::AllLinear => Ok(!crate::contents::is_head(path)),
        }
    }
}

/// Whether `path` is `name` or ends with a dot and `name`.
pub(super) fn ends_with(path: &str, name: &str) -> bool {
    let before = path.strip_suffix(name);
    before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Whether an expression matches a whole path.
pub(super) fn whole(expression: &str, path: &str) -> Result<bool> {
    let found = regex(&format!("^(?:{expression})$"), expression)?.is_match(path);
    found.map_err(unmatchable(expression, path))
}

/// The number that the first group of an expression finds in a path.
pub(super) fn captured(expression: &str, path: &str) -> Result<Option<usize>> {
    let found = regex(expression, expression)?.captures(path);
    let found = found.map_err(unmatchable(expression, path))?;
    let number = found.and_then(|found| found.get(1)?.as_str().parse().ok());
    Ok(number)
}

/// Compiles an expression; `shown` is for messages.
fn regex(expression: &str, shown: &str) -> Result<Regex> {
    let regex = Regex::new(expression).map_err(|error| PatternError {
        pattern: shown.to_string(),
        reason: error.to_string(),
    });
    Ok(regex?)
}

/// Matching fails at the backtracking limit.
fn unmatchable(expression: &str, path: &str) -> impl Fn(fancy_regex::Error) -> Error {
    move |error| Error::Pattern {
        pattern: expression.to_string(),
        layer: path.to_string(),
        reason: error.to_string(),
    }
}

impl std::str::FromStr for Targets {
    type Err = Error;

    /// `all-linear`; a regular expression, if the text has one of its operators; otherwise names separated by commas.
    fn from_str(text: &str) -> Result<Self> {
        if text.eq_ignore_ascii_case(ALL_LINEAR) {
            return Ok(Self::AllLinear);
        }
        if text.contains(OPERATORS) {
            whole(text, "")?;
            return Ok(Self::Expression(text.to_string()));
        }
        let names = text.split(',').map(str::trim);
        let names: Vec<&str> = names.filter(|name| !name.is_empty()).collect();
        match names.is_empty() {
            true => Err(PatternError {
                pattern: text.to_string(),
                reason: "it names no layer".to_string(),
            }
            .into()),
            false => Ok(Self::names(names)),
        }
    }
}

impl std::fmt::Display for Targets {
    /// As [`Targets::from_str`](std::str::FromStr) reads it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Names(names) => f.write_str(&names.join(",")),
            Self::Expression(expression) => f.write_str(expression),
            Self::AllLinear => f.write_str(ALL_LINEAR),
        }
    }
}
