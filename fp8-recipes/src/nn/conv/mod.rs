//! `candle_nn::conv`: convolutions, candle-nn's outside a guard, FP8 inside one once they are prepared.
//!
//! The gradients of one-dimensional convolutions are right; those of candle 0.11.1 are wrong for batches of more than one row.

mod kernel;
mod one_dim;

pub use candle_nn::conv::*;

use super::StaticWeight;
use super::call::{Call, calibrate, noting_failure};
use super::identity::{SharedState, path_and_state, path_methods};
use super::scaled_parameter::{along_channels, optional, refuse_scaled_tensors, scaled, value_of};
use crate::array::{Array, Layer};
use crate::autocast::{Fp8State, current};
use crate::module::{Fp8Layer, LayerKind};
use crate::{Fp8Module, Visitor};
use candle_core::{DType, Module, Result, Tensor};
use candle_nn::{BatchNorm, VarBuilder};
use fp8_candle::Role;
use fp8_candle::conv::ConvWeight;
use fp8_scaled::{Parameter, Scaled};
use kernel::Kernel;
use std::ops::Deref;
use std::sync::Arc;
use tracing::span::EnteredSpan;

/// A convolution of candle_nn that knows its checkpoint path; its other methods are candle-nn's.
///
/// - Outside a guard, inside a disabled one, or when the layer was not prepared: in high precision.
/// - Prepared ([`crate::prepare_fp8`]) and inside an enabled guard: FP8 by the guard's recipe. An export keeps the
///   weight in high precision.
///
/// Clones share weight and FP8 state.
#[derive(Debug, Clone)]
pub struct Convolution<C> {
    inner: C,
    weight: Parameter,
    bias: Option<Parameter>,
    path: Option<Arc<str>>,
    state: SharedState,
}

/// `candle_nn::Conv1d` that knows its checkpoint path: see [`Convolution`].
pub type Conv1d = Convolution<candle_nn::Conv1d>;

/// `candle_nn::Conv2d` that knows its checkpoint path: see [`Convolution`].
pub type Conv2d = Convolution<candle_nn::Conv2d>;

/// `candle_nn::ConvTranspose1d` that knows its checkpoint path: see [`Convolution`].
pub type ConvTranspose1d = Convolution<candle_nn::ConvTranspose1d>;

/// `candle_nn::ConvTranspose2d` that knows its checkpoint path: see [`Convolution`].
pub type ConvTranspose2d = Convolution<candle_nn::ConvTranspose2d>;

impl<C: Kernel> Convolution<C> {
    /// As candle-nn's, without a path.
    pub fn new(weight: Tensor, bias: Option<Tensor>, config: C::Config) -> Self {
        C::build(weight, bias, config).into()
    }

    /// FP8 state, if the layer is prepared.
    pub fn fp8_state(&self) -> Option<Arc<Fp8State>> {
        self.state.get()
    }

    /// [`Module::forward`] with an error that can be matched: candle's `Result` carries only the message of ours.
    ///
    /// # Errors
    /// [`fp8_candle::Error::Conv`] if the sizes are invalid, and errors of the guard's recipe.
    pub fn try_forward(&self, x: &Tensor) -> crate::Result<Tensor> {
        let _span = self.entered();
        let context = current();
        let y = Call::decide(self, &self.state, context.as_ref()).and_then(|call| {
            let inner = self.with_values(x.dtype())?;
            let (weight, _) = inner.parameters();
            match call {
                Call::Fp8(state, plan) => {
                    inner.fp8(x, ConvWeight::new(weight).with_cache(&state.cache), &plan)
                }
                Call::Calibrate(state, step) => {
                    calibrate(&state, &step, x, || Ok(weight.clone()))?;
                    inner.plain(x)
                }
                Call::HighPrecision | Call::Static(_) | Call::Dequantized(_) => inner.plain(x),
            }
        });
        noting_failure(context.as_ref(), y)
    }

    /// Enters the span of a forward pass.
    fn entered(&self) -> EnteredSpan {
        tracing::trace_span!("conv", kind = C::KIND, path = self.path()).entered()
    }

    /// candle-nn's layer, with the values of its parameters where these are scaled.
    fn with_values(&self, dtype: DType) -> crate::Result<C> {
        let bias = value_of(self.bias.as_ref(), dtype)?;
        Ok(self.inner.rebuild(self.weight.value(dtype)?, bias))
    }

    fn on_scaled(&self, x: &Scaled) -> crate::Result<Scaled> {
        let _span = self.entered();
        let weight = scaled(&self.weight, self.path(), "weight")?;
        let y = self.inner.scaled(x, &weight)?;
        match optional(self.bias.as_ref(), self.path(), "bias")? {
            Some(bias) => Ok(y.add(&along_channels(&bias, y.rank())?)?),
            None => Ok(y),
        }
    }
}

impl<C: Kernel> From<C> for Convolution<C> {
    fn from(inner: C) -> Self {
        let (weight, bias) = inner.parameters();
        Self {
            weight: Parameter::of(weight),
            bias: bias.map(Parameter::of),
            inner,
            path: None,
            state: SharedState::default(),
        }
    }
}

impl<C> Deref for Convolution<C> {
    type Target = C;

    fn deref(&self) -> &C {
        &self.inner
    }
}

impl<C: Kernel> Module for Convolution<C> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.try_forward(x)?)
    }
}

impl<A: Array, C: Kernel> Layer<A> for Convolution<C> {
    fn apply(&self, x: &A) -> crate::Result<A> {
        x.by_kind(
            |x| self.try_forward(x),
            |x| self.on_scaled(x),
            |x| x.unsupported("a convolution"),
        )
    }
}

path_methods!(Convolution<C>, state);

impl<C: Kernel> Fp8Layer for Convolution<C> {
    path_and_state!();

    fn roles(&self) -> &'static [Role] {
        &[Role::Input, Role::Weight, Role::GradOutput]
    }

    fn held_weight(&self) -> &Tensor {
        self.inner.parameters().0
    }

    fn static_weight(&self) -> Option<&StaticWeight> {
        None
    }

    fn bias(&self) -> Option<&Tensor> {
        self.inner.parameters().1
    }

    fn kind(&self) -> LayerKind {
        LayerKind::Convolution
    }

    fn features(&self) -> (usize, usize) {
        self.inner.features()
    }

    fn output_dim(&self) -> Option<usize> {
        self.inner.output_dim()
    }
}

impl<C: Kernel> Fp8Module for Convolution<C> {
    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.layer(self);
    }
}

impl Convolution<candle_nn::Conv2d> {
    /// The convolution followed by `bn`, as one convolution that gradients go through; [`nn::fuse_batch_norm`] makes one for
    /// inference, of any dtypes.
    ///
    /// [`nn::fuse_batch_norm`]: crate::nn::fuse_batch_norm
    ///
    /// # Errors
    /// If `bn` has no weight and bias, or another number of channels; [`Error::ScaledParameter`](crate::Error::ScaledParameter) for
    /// scaled parameters, which no gradient would reach.
    pub fn absorb_bn(&self, bn: &BatchNorm) -> Result<Self> {
        let mut tensors = vec![self.inner.weight(), bn.running_mean(), bn.running_var()];
        tensors.extend(self.inner.bias());
        if let Some((weight, bias)) = bn.weight_and_bias() {
            tensors.extend([weight, bias]);
        }
        let instead = "call nn::fuse_batch_norm, which computes with the values";
        refuse_scaled_tensors(&tensors, "nn::Conv2d::absorb_bn", instead)?;
        let path = self.path.clone();
        let inner = self.with_values(self.inner.weight().dtype())?;
        let fused = Self::from(inner.absorb_bn(bn)?);
        Ok(Self { path, ..fused })
    }
}

macro_rules! constructors {
    ($($(#[$doc:meta])* $create:ident: $type:ident, $config:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        /// If a tensor is missing or has another shape.
        pub fn $create(
            in_channels: usize,
            out_channels: usize,
            kernel_size: usize,
            cfg: $config,
            vb: VarBuilder<'_>,
        ) -> Result<$type> {
            let path = vb.prefix();
            let inner = candle_nn::$create(in_channels, out_channels, kernel_size, cfg, vb)?;
            Ok($type::from(inner).with_path(path))
        }
    )*};
}

constructors! {
    /// Creates or loads a [`Conv1d`], with candle-nn's initialization.
    conv1d: Conv1d, Conv1dConfig;
    /// [`conv1d`] without a bias.
    conv1d_no_bias: Conv1d, Conv1dConfig;
    /// Creates or loads a [`Conv2d`], with candle-nn's initialization.
    conv2d: Conv2d, Conv2dConfig;
    /// [`conv2d`] without a bias.
    conv2d_no_bias: Conv2d, Conv2dConfig;
    /// Creates or loads a [`ConvTranspose1d`], with candle-nn's initialization.
    conv_transpose1d: ConvTranspose1d, ConvTranspose1dConfig;
    /// [`conv_transpose1d`] without a bias.
    conv_transpose1d_no_bias: ConvTranspose1d, ConvTranspose1dConfig;
    /// Creates or loads a [`ConvTranspose2d`], with candle-nn's initialization.
    conv_transpose2d: ConvTranspose2d, ConvTranspose2dConfig;
    /// [`conv_transpose2d`] without a bias.
    conv_transpose2d_no_bias: ConvTranspose2d, ConvTranspose2dConfig;
}
