//! A twin of `candle_transformers::models::with_tracing`: the same names and signatures, over the layers of [`nn`].
//!
//! A model of candle-transformers that says `use super::with_tracing::{Linear, RmsNorm, ..}` says
//! `use fp8_recipes::with_tracing::{Linear, RmsNorm, ..}` instead. Every layer of [`nn`] that has a checkpoint path enters a `tracing`
//! span of level TRACE in its forward pass, with that path, so that [`Linear`], [`LayerNorm`] and [`Conv2d`] are the same types in both
//! modules; [`Embedding`] and [`RmsNorm`] have other constructors here.
//!
//! An [`nn::LSTM`] or [`nn::GRU`] enters its span at each step. Modules made of layers, such as [`nn::TransformerLayer`], have no span of
//! their own; where one is a single node, linear layers that it computes together share a span with all their paths. Layers that are
//! candle's own (`PReLU`, `Dropout`, ..) have none.
//!
//! `QMatMul` is missing: it multiplies by GGML-quantized weights, which have no values in high precision to train or to cast
//! to FP8.

pub use crate::nn::{
    Conv2d, LayerNorm, Linear, conv2d, layer_norm, linear, linear_b, linear_no_bias,
};

use crate::{Fp8Module, nn};
use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;

/// [`nn::Embedding`] with the constructors of `with_tracing`.
#[derive(Debug, Clone, Fp8Module)]
#[fp8(crate = "crate")]
pub struct Embedding(nn::Embedding);

impl Embedding {
    /// Creates or loads `d1` embeddings of length `d2`.
    ///
    /// # Errors
    /// If the tensor is missing or has another shape.
    pub fn new(d1: usize, d2: usize, vb: VarBuilder<'_>) -> Result<Self> {
        nn::embedding(d1, d2, vb).map(Self)
    }

    /// `weights`: `[vocabulary, hidden_size]`.
    ///
    /// # Errors
    /// If `weights` is not a matrix.
    pub fn from_weights(weights: Tensor) -> Result<Self> {
        let (_, hidden_size) = weights.dims2()?;
        Ok(Self(nn::Embedding::new(weights, hidden_size)))
    }

    /// `[vocabulary, hidden_size]`.
    pub fn embeddings(&self) -> &Tensor {
        self.0.embeddings()
    }
}

impl Module for Embedding {
    /// Integer indexes of any shape `[..]` to `[.., hidden_size]`.
    fn forward(&self, indexes: &Tensor) -> Result<Tensor> {
        self.0.forward(indexes)
    }
}

/// [`nn::RmsNorm`] with the constructor of `with_tracing`.
#[derive(Debug, Clone, Fp8Module)]
#[fp8(crate = "crate")]
pub struct RmsNorm(nn::RmsNorm);

impl RmsNorm {
    /// Creates or loads the norm of `size` features.
    ///
    /// # Errors
    /// If the tensor is missing or has another shape.
    pub fn new(size: usize, eps: f64, vb: VarBuilder<'_>) -> Result<Self> {
        nn::rms_norm(size, eps, vb).map(Self)
    }

    /// The forward pass.
    ///
    /// # Errors
    /// If `x` does not fit the weight.
    pub fn forward_diff(&self, x: &Tensor) -> Result<Tensor> {
        self.0.forward_diff(x)
    }
}

impl Module for RmsNorm {
    /// `[.., size]` to the same shape.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.forward(x)
    }
}
