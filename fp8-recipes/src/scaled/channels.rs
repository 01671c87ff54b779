//! Layers over channels on scaled tensors: convolutions along one dimension, transposed ones, batch norm and group norm.

use super::array::Array;
use super::layer::{Layer, optional, parameter};
use crate::error::Result;
use crate::nn;
use candle_core::{DType, Module, Tensor};
use candle_nn::ModuleT;
use fp8_candle::conv::ConvShape;
use fp8_scaled::Scaled;

/// A layer that [`Array`] computes on plain and on scaled tensors.
#[doc(hidden)]
#[derive(Debug, Clone, Copy)]
pub enum ChannelLayer<'a> {
    Conv1d(&'a nn::Conv1d),
    ConvTranspose1d(&'a nn::ConvTranspose1d),
    ConvTranspose2d(&'a nn::ConvTranspose2d),
    GroupNorm(&'a nn::GroupNorm),
    /// In training or not.
    BatchNorm(&'a nn::BatchNorm, bool),
}

impl<A: Array> Layer<A> for nn::Conv1d {
    fn apply(&self, x: &A) -> Result<A> {
        A::over_channels(ChannelLayer::Conv1d(self), x)
    }
}

impl<A: Array> Layer<A> for nn::ConvTranspose1d {
    fn apply(&self, x: &A) -> Result<A> {
        A::over_channels(ChannelLayer::ConvTranspose1d(self), x)
    }
}

impl<A: Array> Layer<A> for nn::ConvTranspose2d {
    fn apply(&self, x: &A) -> Result<A> {
        A::over_channels(ChannelLayer::ConvTranspose2d(self), x)
    }
}

impl<A: Array> Layer<A> for nn::GroupNorm {
    fn apply(&self, x: &A) -> Result<A> {
        A::over_channels(ChannelLayer::GroupNorm(self), x)
    }
}

impl nn::BatchNorm {
    /// [`ModuleT::forward_t`] of plain or scaled tensors `[batch, num_features, ..]`.
    ///
    /// # Errors
    /// As [`ModuleT::forward_t`]; [`Error::NotScaled`](crate::Error::NotScaled) for a scaled `x` where a parameter is a plain tensor.
    pub fn apply_t<A: Array>(&self, x: &A, train: bool) -> Result<A> {
        A::over_channels(ChannelLayer::BatchNorm(self, train), x)
    }
}

pub(super) fn plain(layer: ChannelLayer<'_>, x: &Tensor) -> Result<Tensor> {
    match layer {
        ChannelLayer::Conv1d(layer) => layer.try_forward(x),
        ChannelLayer::ConvTranspose1d(layer) => layer.try_forward(x),
        ChannelLayer::ConvTranspose2d(layer) => layer.try_forward(x),
        ChannelLayer::GroupNorm(layer) => Ok(layer.forward(x)?),
        ChannelLayer::BatchNorm(layer, train) => Ok(layer.forward_t(x, train)?),
    }
}

pub(super) fn scaled(layer: ChannelLayer<'_>, x: &Scaled) -> Result<Scaled> {
    match layer {
        ChannelLayer::Conv1d(layer) => {
            let kernel = parameter(layer.weight(), layer.path(), "weight")?;
            let config = layer.config();
            let y = x.conv1d(
                &kernel,
                config.padding,
                config.stride,
                config.dilation,
                config.groups,
            )?;
            with_bias(y, layer.bias(), layer.path())
        }
        ChannelLayer::ConvTranspose1d(layer) => {
            let kernel = parameter(layer.weight(), layer.path(), "weight")?;
            let config = layer.config();
            let shape = ConvShape::new()
                .with_padding([config.padding; 2])
                .with_output_padding([config.output_padding; 2])
                .with_stride([config.stride; 2])
                .with_dilation([config.dilation; 2])
                .with_groups(config.groups);
            let y = x.conv_transpose1d(&kernel, &shape)?;
            with_bias(y, layer.bias(), layer.path())
        }
        ChannelLayer::ConvTranspose2d(layer) => {
            let kernel = parameter(layer.weight(), layer.path(), "weight")?;
            let config = layer.config();
            let shape = ConvShape::new()
                .with_padding([config.padding; 2])
                .with_output_padding([config.output_padding; 2])
                .with_stride([config.stride; 2])
                .with_dilation([config.dilation; 2]);
            let y = x.conv_transpose2d(&kernel, &shape)?;
            with_bias(y, layer.bias(), layer.path())
        }
        ChannelLayer::GroupNorm(layer) => {
            let gain = parameter(layer.weight(), layer.path(), "weight")?;
            let bias = parameter(layer.bias(), layer.path(), "bias")?;
            Ok(x.group_norm(layer.num_groups(), &gain, Some(&bias), layer.eps())?)
        }
        ChannelLayer::BatchNorm(layer, train) => batch_norm(layer, x, train),
    }
}

/// `x` along dimension 1 of `rank`.
fn along(x: &Scaled, rank: usize) -> Result<Scaled> {
    let mut dims = vec![1; rank];
    dims[1] = x.elem_count();
    Ok(x.reshape(&dims)?)
}

fn with_bias(y: Scaled, bias: Option<&Tensor>, path: Option<&str>) -> Result<Scaled> {
    match optional(bias, path, "bias")? {
        Some(bias) => Ok(y.add(&along(&bias, y.rank())?)?),
        None => Ok(y),
    }
}

fn batch_norm(layer: &nn::BatchNorm, x: &Scaled, train: bool) -> Result<Scaled> {
    let path = layer.path();
    let (weight, bias) = layer.weight_and_bias().unzip();
    let gain = optional(weight, path, "weight")?;
    let bias = optional(bias, path, "bias")?;
    if train {
        // The running statistics follow those of the values.
        layer.forward_train(&x.detach().to_tensor(DType::F32)?)?;
        return Ok(x.batch_norm(
            layer.remove_mean(),
            gain.as_ref(),
            bias.as_ref(),
            layer.eps(),
        )?);
    }
    let statistic = |tensor, own| -> Result<Scaled> { Ok(parameter(tensor, path, own)?.detach()) };
    let mean = statistic(layer.running_mean(), "running_mean")?;
    let variance = statistic(layer.running_var(), "running_var")?;
    let inverse = variance.add_constant(layer.eps())?.rsqrt()?;
    let y = x.sub(&along(&mean, x.rank())?)?;
    let y = y.mul(&along(&inverse, x.rank())?)?;
    let y = match gain {
        Some(gain) => y.mul(&along(&gain, x.rank())?)?,
        None => y,
    };
    match bias {
        Some(bias) => Ok(y.add(&along(&bias, x.rank())?)?),
        None => Ok(y),
    }
}
