//! The linear layer in FP8: one forward and two backward GEMMs, each operand with its own cast.
//!
//! | GEMM | A | B |
//! |---|---|---|
//! | output `[M, N]` | x `[M, K]` | weight `[N, K]` |
//! | grad_input `[M, K]` | grad_output `[M, N]` | weight |
//! | grad_weight `[N, K]` | grad_output | x |
//!
//! Scales run along the dimension that a GEMM keeps, so a rowwise operand is quantized again from high precision for its
//! second GEMM; a tensorwise copy serves both. The gradient of a cast is straight-through.
//!
//! Source: torchao's `matmul_with_hp_or_float8_args`, Transformer Engine's `Linear`.

mod backward;
mod batched;
mod fetch;
mod forward;
mod held;
mod plan;
mod source;
mod wide;

pub(crate) use backward::{BackwardProducts, LinearBackward, Operands, gradients};
pub use batched::fp8_linear_batched;
pub use forward::fp8_linear;
pub(crate) use forward::{check_operands, compute, quantize_weight};
pub(crate) use held::HeldWeight;
pub(crate) use plan::SavedCasts;
pub use plan::{GemmPlan, LinearPlan, LinearWeight, ResultCasts};
pub use source::WeightSource;
pub use wide::WideLinear;
