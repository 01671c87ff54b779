//! Invalid scales.

use thiserror::Error;

/// A number that is not a scale of scaled arithmetic, or a rule that has no result for a scale.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ScaledError {
    /// The scale is not a power of two.
    #[error(
        "scale {got:e} is not a power of two from 2^-126 to 2^127, as scaled arithmetic has it unless the check is lenient"
    )]
    NotPowerOfTwo {
        /// The number refused.
        got: f32,
    },
    /// The scale is below zero.
    #[error("scale {got:e} is negative: the sign of a value stands in its data")]
    Negative {
        /// The number refused.
        got: f32,
    },
    /// The scale is infinite or NaN.
    #[error("scale {got} is not finite")]
    NotFinite {
        /// The number refused.
        got: f32,
    },
    /// A zero scale where the rule divides by it or takes its logarithm.
    #[error("{op}: the scale of an operand is 0, which this operation has no result for")]
    Zero {
        /// The operation.
        op: &'static str,
    },
    /// E8M0 has only powers of two from 2^-127 to 2^127.
    #[error("scale {got:e} has no E8M0 code: the codes are powers of two from 2^-127 to 2^127")]
    NoE8m0 {
        /// The number refused.
        got: f32,
    },
}
