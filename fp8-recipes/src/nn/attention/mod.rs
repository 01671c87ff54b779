//! `candle_nn::attention`, differentiable.
//!
//! Where no gradient is tracked, these are candle-nn's kernels. Elsewhere the same formula is composed of products and a
//! softmax, which keeps the probabilities for the backward pass.

pub mod cpu_flash;
mod scores;
pub mod varlen;

pub use candle_nn::attention::AttnMask;
pub use cpu_flash::flash_attn;
pub use cpu_flash::varlen::flash_attn_varlen_cpu;
pub use varlen::flash_attn_varlen_unfused;

pub(super) use scores::{Scores, causal_bias};

use candle_core::Tensor;

/// Whether a gradient is tracked in one of them.
fn tracked(tensors: &[&Tensor]) -> bool {
    tensors.iter().any(|tensor| tensor.track_op())
}
