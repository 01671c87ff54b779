//! The result of a cast.

use crate::cast::tensor::Fp8Tensor;
use candle_core::Tensor;
use fp8_core::Cast;

/// A quantized tensor, and what the cast measured.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Quantized {
    /// Codes and dequant_scale.
    pub tensor: Fp8Tensor,
    /// f32 `[scale_rows, scale_cols]`, the factors before the cast.
    pub quant_scale: Tensor,
    /// f32 amax per scale, if the cast measured it.
    pub amax: Option<Tensor>,
    /// The cast that was done, with the key of a stochastic rounding.
    pub cast: Cast,
}
