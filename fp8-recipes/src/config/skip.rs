//! Why a layer stays in high precision.

use super::{PathPattern, RecipeName};
use candle_core::DType;
use std::fmt;
use std::time::Duration;

/// Why a layer stays in high precision. Prints as a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum SkipReason {
    /// A pattern of [`crate::PrepareOptions::with_off`] matches it.
    Off {
        /// The pattern.
        pattern: PathPattern,
    },
    /// A string of [`super::LayerFilter::skip_paths`] is part of its path.
    PathContains {
        /// The string.
        part: String,
    },
    /// It has fewer outputs (N) or inputs (K) than the filter takes.
    TooFew {
        /// Which of the two.
        dim: WeightDim,
        /// Its size.
        got: usize,
        /// The smallest accepted size.
        least: usize,
    },
    /// Its outputs (N) or inputs (K) are not a multiple of what the filter asks for.
    NotMultiple {
        /// Which of the two.
        dim: WeightDim,
        /// Its size.
        got: usize,
        /// The required divisor.
        of: usize,
    },
    /// It is too small to gain from the recipe on an accelerator: see [`super::auto_filter`].
    TooSmall {
        /// The recipe.
        recipe: RecipeName,
        /// Outputs.
        out_features: usize,
        /// Inputs.
        in_features: usize,
    },
    /// It is no faster in FP8 on this machine: see [`crate::PrepareOptions::auto`].
    NotFaster {
        /// The recipe.
        recipe: String,
        /// Tokens of a call.
        tokens: usize,
        /// The time of a call in FP8.
        fp8: Duration,
        /// The same in high precision.
        high_precision: Duration,
    },
    /// It has batch axes: [`crate::PrepareOptions::auto`] has no times for such layers.
    NotTimed,
    /// The filter's custom function rejects it.
    Custom,
    /// It was loaded from an FP8 checkpoint.
    AlreadyFp8,
    /// It is a convolution, and [`crate::PrepareOptions::convolutions`] is off.
    ConvolutionsOff,
    /// It is an operator that was prepared before, or has a recipe of its own that casts operators, and
    /// [`crate::PrepareOptions::operators`] is off.
    OperatorsOff,
    /// It is a layer of candle_nn, which has no FP8 form. The layers of [`nn`](crate::nn) have the same names and signatures.
    CandleNn,
    /// Its path is not known.
    NoPath,
    /// It is at the root of the checkpoint: its weight is named just `weight`.
    AtRoot,
    /// An earlier layer with another weight has the same path, or an operator has the path of a layer or of another operator.
    SamePath,
    /// Its weight is also used elsewhere, such as by an embedding tied to it.
    Tied {
        /// The first other name of the weight, if known.
        with: Option<String>,
    },
    /// Its weight is not f32, bf16 or f16.
    WeightDType(DType),
    /// Its weight holds Inf or NaN.
    NonFinite {
        /// The number of NaN.
        nan: usize,
        /// The number of Inf.
        inf: usize,
        /// The number of values.
        of: usize,
    },
}

/// A dimension of a weight `[out_features, in_features]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightDim {
    /// out_features.
    N,
    /// in_features.
    K,
}

names! { WeightDim::name: N = "N", K = "K" }

impl fmt::Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SkipReason::Off { pattern } => write!(f, "`{pattern}` is off"),
            SkipReason::PathContains { part } => write!(f, "path contains `{part}`"),
            SkipReason::TooFew { dim, got, least } => write!(f, "{dim} = {got} is below {least}"),
            SkipReason::NotMultiple { dim, got, of } => {
                write!(f, "{dim} = {got} is not a multiple of {of}")
            }
            SkipReason::TooSmall {
                recipe,
                out_features: n,
                in_features: k,
            } => write!(f, "N = {n}, K = {k} is too small to gain from `{recipe}`"),
            SkipReason::NotFaster {
                recipe,
                tokens,
                fp8,
                high_precision,
            } => {
                let ms = |time: &Duration| time.as_secs_f64() * 1e3;
                let (fp8, high_precision) = (ms(fp8), ms(high_precision));
                write!(
                    f,
                    "no faster in FP8 here: {fp8:.3} ms against {high_precision:.3} ms for {tokens} tokens under `{recipe}`"
                )
            }
            SkipReason::NotTimed => f.write_str(
                "it has batch axes, for which PrepareOptions::auto has no times: prepare it with other options",
            ),
            SkipReason::Custom => f.write_str("custom filter"),
            SkipReason::AlreadyFp8 => f.write_str("the weight is FP8 already (static inference)"),
            SkipReason::ConvolutionsOff => f.write_str(
                "convolutions are off: PrepareOptions::with_convolutions(true) converts them",
            ),
            SkipReason::OperatorsOff => f.write_str(
                "operators are off: PrepareOptions::with_operators(true) prepares them",
            ),
            SkipReason::CandleNn => {
                f.write_str("a layer of candle_nn, which has no FP8: use the one of `nn`")
            }
            SkipReason::NoPath => {
                f.write_str("it has no path: build it from a VarBuilder or call with_path")
            }
            SkipReason::AtRoot => {
                f.write_str("it is at the root of the checkpoint: build it from `vb.pp(..)`")
            }
            SkipReason::SamePath => f.write_str("another layer has the same path"),
            SkipReason::Tied { with: Some(with) } => {
                write!(
                    f,
                    "its weight is shared with `{with}`, which stays in high precision"
                )
            }
            SkipReason::Tied { with: None } => f.write_str(
                "its weight is shared with an unnamed tensor, which stays in high precision",
            ),
            SkipReason::WeightDType(dtype) => {
                write!(f, "the weight is {}, not f32, bf16 or f16", dtype.as_str())
            }
            SkipReason::NonFinite { nan, inf, of } => {
                write!(f, "the weight holds {nan} NaN and {inf} Inf of {of} values")
            }
        }
    }
}
