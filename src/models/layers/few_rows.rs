//! Products of few rows, which read the weight once and sum each row by itself.

use candle_core::{D, DType, Tensor};

/// Up to this many rows, sequences that generate together are computed together.
pub(crate) const FEW_ROWS: usize = 8;

/// Whether `x`, `[.., features]`, has at most [`FEW_ROWS`] rows in f32 or 16 bits on the CPU, without a gradient.
pub(crate) fn is_few(x: &Tensor) -> bool {
    let features = x.dim(D::Minus1).unwrap_or(0).max(1);
    let narrow = matches!(x.dtype(), DType::F32 | DType::BF16 | DType::F16);
    narrow && x.device().is_cpu() && !x.track_op() && x.elem_count() / features <= FEW_ROWS
}
