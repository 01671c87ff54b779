//! Typed errors. Every message names the value that was refused.

use thiserror::Error;

/// A string that is not the name of a [`Format`](crate::Format).
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("unknown 8-bit format {name:?}; the formats are e4m3, e5m2, e4m3fnuz, e5m2fnuz")]
#[non_exhaustive]
pub struct ParseFormatError {
    /// The string as given.
    pub name: String,
}

/// A string that is not the name of a variant of one of the enums of this crate.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "unknown {what} {name:?}; expected {expected}{}",
    did_you_mean(name, names(expected))
)]
pub struct ParseNameError {
    /// What the string should name, for example `rounding`.
    pub what: &'static str,
    /// The string as given.
    pub name: String,
    /// The accepted names.
    pub expected: &'static str,
}

/// The names in a list as an error shows it.
fn names(expected: &str) -> impl Iterator<Item = &str> {
    expected.split([',', ' ', '(', ')'])
}

/// What an error adds where `name` is likely a misspelling of one of `names`: `; did you mean rowwise?`, or nothing.
pub fn did_you_mean<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    // Words that join a list are no names.
    let names = names.into_iter().filter(|name| name.len() > 2);
    let near = names.map(|near| (strsim::normalized_damerau_levenshtein(name, near), near));
    match near.max_by(|a, b| a.0.total_cmp(&b.0)) {
        Some((likeness, near)) if likeness >= 0.6 => format!("; did you mean {near}?"),
        _ => String::new(),
    }
}

/// An amax from which no static scale can be made.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ScaleError {
    /// The calibrated amax is infinite or NaN.
    #[error("amax {amax} is not finite: the calibration data holds an infinity or a NaN")]
    NonFinite {
        /// The refused amax.
        amax: f32,
    },
    /// The calibrated amax is below zero, which no maximum of magnitudes is.
    #[error("amax {amax} is negative: an amax is a maximum of magnitudes")]
    Negative {
        /// The refused amax.
        amax: f32,
    },
}

/// Sizes that do not make a [`ScaleGrid`](crate::ScaleGrid).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GridError {
    /// A block without rows or columns covers nothing.
    #[error(
        "a scale block of {block_rows}x{block_cols} covers no element: it must have at least one row and one column"
    )]
    EmptyBlock {
        /// Rows of one block.
        block_rows: usize,
        /// Columns of one block.
        block_cols: usize,
    },
    /// The matrix has more elements than a `usize` can count.
    #[error(
        "a matrix of {rows}x{cols} has more elements than can be indexed: at most {} are allowed",
        usize::MAX
    )]
    TooLarge {
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
    },
}
