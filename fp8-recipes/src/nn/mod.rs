//! Layers with the names, constructors and signatures of `candle_nn`, so that the swap is one `use` line.
//!
//! [`Linear`] computes in FP8 inside a guard once it is prepared. The norms are differentiable, which candle-nn's
//! are not (their gradients are silently cut). Every layer knows its checkpoint path from `VarBuilder::prefix`.

mod embedding;
mod linear;
mod norm;
mod shared_state;
mod static_weight;

pub use embedding::{Embedding, embedding};
pub use linear::{Linear, linear, linear_b, linear_no_bias};
pub use norm::{LayerNorm, RmsNorm, layer_norm, layer_norm_no_bias, rms_norm};
pub use static_weight::{InputScaling, StaticWeight};

pub use fp8_candle::ops;

use candle_core::Tensor;

/// A parameter that is not part of a layer of this module, with its checkpoint name.
#[derive(Debug, Clone)]
pub struct Parameter {
    path: String,
    tensor: Tensor,
}

impl Parameter {
    /// Names `tensor`; `path` is its full name in the checkpoint.
    pub fn new(path: impl Into<String>, tensor: Tensor) -> Self {
        Self {
            path: path.into(),
            tensor,
        }
    }

    /// The value.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

impl crate::Fp8Module for Parameter {
    fn visit(&self, visitor: &mut dyn crate::Visitor) {
        visitor.tensor(Some(&self.path), &self.tensor);
    }
}

/// `prefix.name`, or `name` at the root.
pub(crate) fn join(prefix: &str, name: &str) -> String {
    if prefix.is_empty() {
        name.to_string()
    } else {
        format!("{prefix}.{name}")
    }
}
