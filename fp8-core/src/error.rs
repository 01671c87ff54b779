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

/// A string that names no variant of one of this crate's enums.
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

/// `Display` and `FromStr` of an enum by the names of its variants; `(_ = value)` is the field that parsing fills in.
macro_rules! named {
    ($type:ident, $what:literal, $expected:literal:
     $($variant:ident $(($any:tt = $value:expr))? $name:literal),+) => {
        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(match self {
                    $(Self::$variant $(($any))? => $name),+
                })
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::error::ParseNameError;

            /// Accepts the names that `Display` writes.
            fn from_str(name: &str) -> Result<Self, Self::Err> {
                match name {
                    $($name => Ok(Self::$variant $(($value))?),)+
                    _ => Err(Self::Err {
                        what: $what,
                        name: name.to_owned(),
                        expected: $expected,
                    }),
                }
            }
        }
    };
}
pub(crate) use named;

/// The names in a list as an error shows it.
fn names(expected: &str) -> impl Iterator<Item = &str> {
    expected.split([',', ' ', '(', ')'])
}

/// A suggestion for an error message, `; did you mean rowwise?`, if `name` looks like a misspelling of one of `names`;
/// otherwise empty.
pub fn did_you_mean<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    // Skip the words that join a list.
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
    /// The calibrated amax is below zero; a maximum of magnitudes cannot be.
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
