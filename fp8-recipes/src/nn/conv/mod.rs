//! `candle_nn::conv`: convolutions, candle-nn's outside a guard, FP8 inside one once they are prepared.
//!
//! Those over one dimension have right gradients; candle 0.11.1 computes wrong ones for batches of more than one row.

mod one_dim;
mod prepared;

pub use candle_nn::conv::*;

use super::StaticWeight;
use super::shared_state::SharedState;
use crate::autocast::Fp8State;
use crate::module::{Fp8Layer, LayerKind};
use crate::scaled::plain_value;
use crate::{Fp8Module, Visitor};
use candle_core::{DType, Module, Result, Tensor};
use candle_nn::{BatchNorm, VarBuilder};
use fp8_candle::Role;
use prepared::Sizes;
use std::ops::Deref;
use std::sync::Arc;

macro_rules! convolutions {
    ($(
        $(#[$doc:meta])* $type:ident, $config:ident, $forward:expr, $create:ident, $create_no_bias:ident,
        fp8_state { $(#[$fp8_state:meta])* } try_forward { $(#[$try_forward:meta])* };
    )*) => {
        $(
            #[doc = concat!("`candle_nn::", stringify!($type), "` that knows its checkpoint path; its other methods are \
                             candle-nn's.")]
            ///
            /// - Outside a guard, inside a disabled one, or when the layer was not prepared: in high precision.
            /// - Prepared ([`crate::prepare_fp8`]) and inside an enabled guard: FP8 by the guard's recipe. An export keeps the
            ///   weight in high precision.
            ///
            /// Clones share weight and FP8 state.
            $(#[$doc])*
            #[derive(Debug, Clone)]
            pub struct $type {
                inner: candle_nn::$type,
                path: Option<String>,
                state: SharedState,
            }

            impl $type {
                /// As candle-nn's, without a path.
                pub fn new(weight: Tensor, bias: Option<Tensor>, config: $config) -> Self {
                    candle_nn::$type::new(weight, bias, config).into()
                }

                /// Sets the checkpoint path. It is another layer then than those that it was cloned from, without FP8 state.
                #[must_use]
                pub fn with_path(mut self, path: impl Into<String>) -> Self {
                    self.path = Some(path.into());
                    self.state = SharedState::default();
                    self
                }

                /// FP8 state, if the layer is prepared.
                $(#[$fp8_state])*
                pub fn fp8_state(&self) -> Option<Arc<Fp8State>> {
                    self.state.get()
                }

                /// [`Module::forward`] with an error that can be matched: candle's `Result` carries only the message of ours.
                ///
                /// # Errors
                /// [`fp8_candle::Error::Conv`] if the sizes make no convolution, and what the guard's recipe finds wrong.
                $(#[$try_forward])*
                pub fn try_forward(&self, x: &Tensor) -> crate::Result<Tensor> {
                    let inner = self.plain(x.dtype())?;
                    prepared::forward(&inner, (&self.state, self.path()), x, || Ok($forward(&inner, x)?))
                }

                /// Path in the checkpoint: empty at its root, None if unknown.
                pub fn path(&self) -> Option<&str> {
                    self.path.as_deref()
                }

                /// The layer with the values of its parameters where these are scaled.
                fn plain(&self, dtype: DType) -> crate::Result<candle_nn::$type> {
                    let value = |tensor| plain_value(tensor, dtype);
                    let weight = value(self.inner.weight())?;
                    let bias = self.inner.bias().map(value).transpose()?;
                    Ok(candle_nn::$type::new(weight, bias, *self.inner.config()))
                }
            }

            impl From<candle_nn::$type> for $type {
                fn from(inner: candle_nn::$type) -> Self {
                    Self {
                        inner,
                        path: None,
                        state: SharedState::default(),
                    }
                }
            }

            impl Deref for $type {
                type Target = candle_nn::$type;

                fn deref(&self) -> &Self::Target {
                    &self.inner
                }
            }

            impl Module for $type {
                fn forward(&self, x: &Tensor) -> Result<Tensor> {
                    Ok(self.try_forward(x)?)
                }
            }

            impl Fp8Layer for $type {
                fn path(&self) -> Option<&str> {
                    $type::path(self)
                }

                fn roles(&self) -> &'static [Role] {
                    &[Role::Input, Role::Weight, Role::GradOutput]
                }

                fn fp8_state(&self) -> Option<Arc<Fp8State>> {
                    self.state.get()
                }

                fn set_fp8_state(&self, state: Option<Arc<Fp8State>>) {
                    self.state.set(state);
                }

                fn held_weight(&self) -> &Tensor {
                    self.inner.weight()
                }

                fn static_weight(&self) -> Option<&StaticWeight> {
                    None
                }

                fn bias(&self) -> Option<&Tensor> {
                    self.inner.bias()
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

            impl Fp8Module for $type {
                fn visit(&self, visitor: &mut dyn Visitor) {
                    visitor.layer(self);
                }
            }

            /// Creates or loads the layer, with candle-nn's initialization.
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

            /// The same without a bias.
            ///
            /// # Errors
            /// If the weight is missing or has another shape.
            pub fn $create_no_bias(
                in_channels: usize,
                out_channels: usize,
                kernel_size: usize,
                cfg: $config,
                vb: VarBuilder<'_>,
            ) -> Result<$type> {
                let path = vb.prefix();
                let inner =
                    candle_nn::$create_no_bias(in_channels, out_channels, kernel_size, cfg, vb)?;
                Ok($type::from(inner).with_path(path))
            }
        )*
    };
}

convolutions! {
    Conv1d, Conv1dConfig, one_dim::conv1d, conv1d, conv1d_no_bias,
        fp8_state {
        }
        try_forward {
        };
    Conv2d, Conv2dConfig, Module::forward, conv2d, conv2d_no_bias,
        fp8_state {
        }
        try_forward {
        };
    ConvTranspose1d, ConvTranspose1dConfig, one_dim::conv_transpose1d, conv_transpose1d, conv_transpose1d_no_bias,
        fp8_state {
        }
        try_forward {
        };
    ConvTranspose2d, ConvTranspose2dConfig, Module::forward, conv_transpose2d, conv_transpose2d_no_bias,
        fp8_state {
        }
        try_forward {
        };
}

impl Conv2d {
    /// The convolution followed by `bn`, as one convolution that gradients go through; [`nn::fuse_batch_norm`] makes one for
    /// inference, of any dtypes.
    ///
    /// [`nn::fuse_batch_norm`]: crate::nn::fuse_batch_norm
    ///
    /// # Errors
    /// If `bn` has no weight and bias, or its size is another one.
    pub fn absorb_bn(&self, bn: &BatchNorm) -> Result<Self> {
        Ok(Self {
            inner: self.inner.absorb_bn(bn)?,
            path: self.path.clone(),
            state: SharedState::default(),
        })
    }
}
