//! How scales are made from the tensor that is cast.

use super::codes::Codes;
use candle_core::Tensor;
use fp8_core::Granularity;

/// How an amax becomes a quant_scale.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum ScalePolicy {
    /// torchao: `MAX / max(amax, 1e-12)`; Inf gives 0, NaN gives NaN.
    Dynamic,
    /// Serving engines: the dequant_scale is made first, `max(amax, 1e-12) / MAX`, and values are divided by it. The quant_scale is its
    /// reciprocal; Inf gives 0, NaN gives NaN.
    Inference,
    /// Microscaling, torchao's default RCEIL: the reciprocal of the least power of two not below `amax / MAX`.
    Mx,
    /// Transformer Engine's current scaling with its `eps`; zero and non-finite amaxes give 1.
    Current {
        /// Lower bound of the amax.
        eps: f32,
    },
}

impl ScalePolicy {
    /// The policy of dynamic scaling for a granularity; microscaling has its own.
    pub fn dynamic(granularity: Granularity) -> Self {
        match granularity {
            Granularity::Mx => Self::Mx,
            _ => Self::Dynamic,
        }
    }
}

/// How a current scale is made from the amax of the tensor that is cast.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CurrentScale {
    /// From amax to quant_scale.
    pub policy: ScalePolicy,
    /// Floor the quant_scale to a power of two.
    pub power_of_two: bool,
}

impl CurrentScale {
    /// Whether values are divided by the dequant_scale. A power of two rounds nothing, so then they are multiplied by its reciprocal.
    pub fn divides(self) -> bool {
        self.policy == ScalePolicy::Inference && !self.power_of_two
    }
}

/// A cast with current scales.
#[derive(Debug, Clone)]
pub struct CurrentCast {
    /// The codes.
    pub codes: Codes,
    /// f32 `[scale_rows, scale_cols]`, the factors before the cast.
    pub quant_scale: Tensor,
    /// The factors after decoding. One is the rounded reciprocal of the other; the policy says which is made first.
    pub dequant_scale: Tensor,
    /// f32 `[scale_rows, scale_cols]`.
    pub amax: Tensor,
}
