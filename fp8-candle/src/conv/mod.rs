//! Convolutions in FP8: the products of a linear layer over unfolded images.
//!
//! With `columns` the images unfolded to `[C/groups * kh * kw, B * Ho * Wo]`, each group computes
//!
//! | product | A | B |
//! |---|---|---|
//! | output `[N, B * Ho * Wo]` | weight `[N, C/groups * kh * kw]` | columns |
//! | columns of grad_input, folded back | weight | grad_output `[N, B * Ho * Wo]` |
//! | grad_weight | grad_output | columns |
//!
//! A tensorwise cast does not care for the shape, so an image is cast once and its codes are unfolded: of a 3x3 kernel nine
//! bytes instead of nine floats per value. Batches are cut into parts whose columns stay in the caches. With other
//! granularities scales run along the sums; there the images are unfolded in high precision and go through
//! [`fp8_linear`](crate::fp8_linear).
//!
//! A transposed convolution computes the second product forward and the first one backward.
//!
//! Source: the FP8 Emulation Toolkit's `Conv2d`, candle-nn's layers for the shapes.

mod by_linear;
mod forward;
mod op;
mod operand;
mod products;
mod shape;

pub use forward::{ConvWeight, fp8_conv_transpose1d, fp8_conv_transpose2d, fp8_conv1d, fp8_conv2d};
pub use shape::{ConvError, ConvShape};
