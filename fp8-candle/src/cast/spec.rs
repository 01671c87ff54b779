//! What a cast computes, apart from its scales.

use crate::cast::stochastic::Stochastic;
use fp8_core::{Cast, Granularity};

/// What a cast computes: format, rounding, overflow, and which elements share a scale.
///
/// Two casts of one tensor give the same codes if their specifications are equal and so are their scales.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct CastSpec {
    /// Format, rounding and overflow.
    pub cast: Cast,
    /// Which elements share a scale.
    pub granularity: Granularity,
    /// See [`Quantizer::with_amax_bound`](crate::Quantizer::with_amax_bound).
    pub amax_bound: Option<f32>,
    /// The source of random bits if rounding is stochastic.
    pub stochastic: Option<Stochastic>,
}

impl CastSpec {
    /// A cast without a bound for amaxes and, unless `cast` says so, without stochastic rounding.
    pub fn new(cast: Cast, granularity: Granularity) -> Self {
        Self {
            cast,
            granularity,
            amax_bound: None,
            stochastic: None,
        }
    }

    /// Whether one quantized copy serves GEMMs over either dimension.
    pub fn is_symmetric(&self) -> bool {
        match self.granularity {
            Granularity::Tensorwise => true,
            Granularity::Rowwise | Granularity::Mx => false,
            Granularity::Blockwise { rows, cols } => rows == cols,
        }
    }
}
