//! Batch norm on arrays.

use super::BatchNorm;
use super::running::Parameters;
use crate::array::Array;
use crate::error::Result;
use crate::nn::scaled_parameter::{along_channels, optional, scaled};
use candle_core::DType;
use candle_nn::ModuleT;
use fp8_scaled::Scaled;

impl BatchNorm {
    /// [`ModuleT::forward_t`] of plain or scaled tensors `[batch, num_features, ..]`.
    ///
    /// # Errors
    /// As [`ModuleT::forward_t`]; [`Error::NotScaled`](crate::Error::NotScaled) for a scaled `x` where a parameter is a plain tensor.
    pub fn apply_t<A: Array>(&self, x: &A, train: bool) -> Result<A> {
        x.by_kind(
            |x| Ok(self.forward_t(x, train)?),
            |x| self.on_scaled(x, train),
            |x| x.unsupported("a batch norm"),
        )
    }

    fn on_scaled(&self, x: &Scaled, train: bool) -> Result<Scaled> {
        let _span = self.entered();
        let path = self.path();
        let Parameters { running, affine } = &self.parameters;
        let (weight, bias) = affine.as_ref().map(|[weight, bias]| (weight, bias)).unzip();
        let gain = optional(weight, path, "weight")?;
        let bias = optional(bias, path, "bias")?;
        if train {
            // The running statistics follow those of the values.
            self.in_training(&x.detach().to_tensor(DType::F32)?)?;
            let (gain, bias) = (gain.as_ref(), bias.as_ref());
            return Ok(x.batch_norm(self.remove_mean(), gain, bias, self.eps())?);
        }
        let along = |parameter: &Scaled| along_channels(parameter, x.rank());
        let mean = scaled(&running[0], path, "running_mean")?.detach();
        let variance = scaled(&running[1], path, "running_var")?.detach();
        let inverse = variance.add_constant(self.eps())?.rsqrt()?;
        let mut y = x.sub(&along(&mean)?)?;
        y = y.mul(&along(&inverse)?)?;
        if let Some(gain) = gain {
            y = y.mul(&along(&gain)?)?;
        }
        match bias {
            Some(bias) => Ok(y.add(&along(&bias)?)?),
            None => Ok(y),
        }
    }
}
