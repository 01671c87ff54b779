//! How scales are made from what is cast.

use super::codes::Codes;
use candle_core::Tensor;

/// How an amax becomes a quant_scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ScalePolicy {
    /// torchao: `MAX / max(amax, 1e-12)`; Inf gives 0, NaN gives NaN.
    Dynamic,
    /// Transformer Engine's current scaling with its `eps`; zero and non-finite amaxes give 1.
    Current {
        /// Lower bound of the amax.
        eps: f32,
    },
}

/// How a current scale is made from the amax of what is cast.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CurrentScale {
    /// From amax to quant_scale.
    pub policy: ScalePolicy,
    /// Floor the quant_scale to a power of two.
    pub power_of_two: bool,
}

/// A cast with current scales.
#[derive(Debug, Clone)]
pub struct CurrentCast {
    /// The codes.
    pub codes: Codes,
    /// f32 `[scale_rows, scale_cols]`, what the values were multiplied by.
    pub quant_scale: Tensor,
    /// Its reciprocal.
    pub dequant_scale: Tensor,
    /// f32 `[scale_rows, scale_cols]`.
    pub amax: Tensor,
}
