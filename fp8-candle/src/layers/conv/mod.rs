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
//! A tensorwise cast does not depend on the shape, so an image is cast once and its codes are unfolded: for a 3x3 kernel nine
//! bytes per value instead of nine floats. Batches are cut into parts whose columns stay in the caches. With other
//! granularities scales run along the sums, group by group: there the image is kept in high precision, and the columns of a
//! part are cast once they are unfolded, and cast again in the backward pass. Observers see all columns of a tensor as one cast.
//!
//! A transposed convolution computes the second product forward and the first one backward.
//!
//! Source: the FP8 Emulation Toolkit's `Conv2d`, candle-nn's layers for the shapes.

mod backward;
mod bare;
mod columns;
mod forward;
mod geometry;
mod operand;
mod products;
mod shape;
mod values;

pub use crate::base::error::ConvError;
pub use bare::{BareConv, BareOperand};
pub use forward::{ConvKind, ConvWeight, fp8_conv};
pub use shape::ConvShape;
