//! `candle_nn::conv`: convolutions that know their checkpoint path. They compute what candle-nn's do, in high precision.
//!
//! Those over one dimension have right gradients; candle 0.11.1 computes wrong ones for batches of more than one row.

mod one_dim;

pub use candle_nn::conv::*;

use super::show;
use crate::{Fp8Module, Visitor};
use candle_core::{Module, Result, Tensor};
use candle_nn::{BatchNorm, VarBuilder};
use std::ops::Deref;

macro_rules! convolutions {
    ($($type:ident, $config:ident, $forward:expr, $create:ident, $create_no_bias:ident;)*) => {
        $(
            #[doc = concat!("`candle_nn::", stringify!($type), "` that knows its checkpoint path; its other methods are \
                             candle-nn's.")]
            #[derive(Debug, Clone)]
            pub struct $type {
                inner: candle_nn::$type,
                path: Option<String>,
            }

            impl $type {
                /// As candle-nn's, without a path.
                pub fn new(weight: Tensor, bias: Option<Tensor>, config: $config) -> Self {
                    candle_nn::$type::new(weight, bias, config).into()
                }

                /// Sets the checkpoint path.
                #[must_use]
                pub fn with_path(mut self, path: impl Into<String>) -> Self {
                    self.path = Some(path.into());
                    self
                }

                /// Path in the checkpoint: empty at its root, None if unknown.
                pub fn path(&self) -> Option<&str> {
                    self.path.as_deref()
                }
            }

            impl From<candle_nn::$type> for $type {
                fn from(inner: candle_nn::$type) -> Self {
                    Self { inner, path: None }
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
                    $forward(&self.inner, x)
                }
            }

            impl Fp8Module for $type {
                fn visit(&self, visitor: &mut dyn Visitor) {
                    show(visitor, self.path(), "weight", self.weight());
                    if let Some(bias) = self.bias() {
                        show(visitor, self.path(), "bias", bias);
                    }
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
    Conv1d, Conv1dConfig, one_dim::conv1d, conv1d, conv1d_no_bias;
    Conv2d, Conv2dConfig, Module::forward, conv2d, conv2d_no_bias;
    ConvTranspose1d, ConvTranspose1dConfig, one_dim::conv_transpose1d, conv_transpose1d, conv_transpose1d_no_bias;
    ConvTranspose2d, ConvTranspose2dConfig, Module::forward, conv_transpose2d, conv_transpose2d_no_bias;
}

impl Conv2d {
    /// The convolution followed by `bn`, as one convolution.
    ///
    /// # Errors
    /// If `bn` has no weight and bias, or its size is another one.
    pub fn absorb_bn(&self, bn: &BatchNorm) -> Result<Self> {
        Ok(Self {
            inner: self.inner.absorb_bn(bn)?,
            path: self.path.clone(),
        })
    }
}
