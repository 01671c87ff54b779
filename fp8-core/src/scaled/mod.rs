//! The scales of scaled arithmetic: a tensor is data and one scale, and every operation has a rule for the scale of its
//! result. Here are the scales and the rules, without tensors.
//!
//! `value = data * scale`. A scale is a power of two, so that moving one from the scale into the data changes nothing but
//! the exponent of the data. The rules keep data near the size that they have for inputs of independent values of size 1:
//! a sum of n of them has the size sqrt(n), which goes into the scale.
//!
//! ```
//! use fp8_core::scaled::{Pow2Rounding, Scale, matmul_rule};
//! let (a, b) = (Scale::new(0.5)?, Scale::new(8.0)?);
//! let rule = matmul_rule(a, b, 1000, Pow2Rounding::Down.of_word(0));
//! assert_eq!(rule.scale.to_f32(), 0.5 * 8.0 * 16.0); // 16 is the power of two below sqrt(1000)
//! assert_eq!(rule.data_factor, 1.0 / 16.0);
//! # Ok::<(), fp8_core::scaled::ScaledError>(())
//! ```
//!
//! Source: "Scalify: scale propagation for efficient low-precision LLM training", arXiv:2407.17353, and its library.

mod error;
mod pow2;
mod rules;
mod scale;

pub use error::ScaledError;
pub use pow2::{Pow2Round, Pow2Rounding};
pub use rules::{
    Aligned, Factored, add_rule, constant_rule, div_rule, extreme_rule, matmul_rule, mean_rule,
    mul_rule, powi_rule, rescale_factor, rescale_norm, rsqrt_rule, sqrt_rule, sum_rule,
};
pub use scale::{Scale, ScaleCheck};
