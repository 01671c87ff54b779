//! Moving factors between data and scale, and casts, which leave the scale alone.

use super::data_norm::{Norm, norm_of};
use super::dtype::ScaledDType;
use super::error::{Result, unsupported};
use super::kernels::times;
use super::options::Options;
use super::value::Scaled;
use candle_core::{DType, Tensor};
use fp8_core::scaled::{Scale, ScaledError, mul_rule, rescale_factor, rescale_norm};

impl Scaled {
    /// The same value at another scale: `data * (scale / new)`.
    ///
    /// # Errors
    /// If `scale` is not a valid scale ([`ScaledError`](fp8_core::scaled::ScaledError)).
    pub fn set_scaling(&self, scale: f32) -> Result<Self> {
        let scale = Options::current().check(scale)?;
        let value = self.moved_to("set_scaling", scale)?;
        Ok(self.recorded(value, "set_scaling", |g| Ok(g.detach())))
    }

    /// Data of another dtype, rounded once (to FP8: to nearest even, saturated). A cast never rescales.
    ///
    /// # Errors
    /// If the dtype is not f32, bf16, f16, f64 or an FP8 format.
    pub fn astype(&self, dtype: impl Into<ScaledDType>) -> Result<Self> {
        let dtype = dtype.into();
        if dtype == self.dtype() {
            return Ok(self.clone());
        }
        let value = match dtype {
            ScaledDType::Fp8(format) => Self::new_fp8(self.cast(format)?.saturated, self.scale()),
            ScaledDType::Float(dtype @ (DType::F32 | DType::BF16 | DType::F16 | DType::F64)) => {
                Self::new(self.float(dtype)?, self.scale())
            }
            ScaledDType::Float(got) => {
                return Err(unsupported(
                    "astype",
                    "the result",
                    "f32, bf16, f16, f64 or an FP8 format",
                    got,
                ));
            }
        };
        let like = super::arith::Like::of(self);
        Ok(self.recorded(value, "astype", move |g| like.cotangent(g)))
    }

    /// The value outside scaled arithmetic: a plain tensor in the dtype of the data, `data * scale` rounded once.
    pub fn stop_scaling(&self) -> Result<Tensor> {
        self.to_tensor(self.compute_dtype())
    }

    /// Moves a power of two from the data to the scale: `data / factor`, `scale * factor`.
    ///
    /// # Errors
    /// If `factor` is not a scale, or 0 ([`ScaledError`]).
    pub fn rebalance(&self, factor: f32) -> Result<Self> {
        let factor = Options::current().check(factor)?;
        if factor.is_zero() {
            return Err(ScaledError::Zero { op: "rebalance" }.into());
        }
        let value = self.rebalanced(factor)?;
        Ok(self.recorded(value, "rebalance", |g| Ok(g.detach())))
    }

    fn rebalanced(&self, factor: Scale) -> Result<Self> {
        if self.scale().is_zero() || factor == Scale::ONE {
            return Ok(self.detach());
        }
        self.moved_to("rebalance", mul_rule(self.scale(), factor).scale)
    }

    /// The value at another scale, without a graph.
    fn moved_to(&self, op: &'static str, scale: Scale) -> Result<Self> {
        let factor = rescale_factor(self.scale(), scale);
        Ok(Self::new(times(op, &self.data()?, factor)?, scale))
    }

    /// Moves the factor `max(r(norm), 2^-14)` from the data to the scale, with the norm of the data in f32. A tensor with Inf or NaN stays
    /// as it is. This waits for the device.
    pub fn dynamic_rescale(&self, norm: Norm) -> Result<Self> {
        let value = self.rebalanced(self.norm_factor(norm)?)?;
        Ok(self.recorded(value, "dynamic_rescale", |g| Ok(g.detach())))
    }

    /// [`Scaled::dynamic_rescale`] by the largest magnitude.
    pub fn dynamic_rescale_max(&self) -> Result<Self> {
        self.dynamic_rescale(Norm::Max)
    }

    /// [`Scaled::dynamic_rescale`] by the mean magnitude.
    pub fn dynamic_rescale_l1(&self) -> Result<Self> {
        self.dynamic_rescale(Norm::L1)
    }

    /// [`Scaled::dynamic_rescale`] by the root of the mean square.
    pub fn dynamic_rescale_l2(&self) -> Result<Self> {
        self.dynamic_rescale(Norm::L2)
    }

    fn norm_factor(&self, norm: Norm) -> Result<Scale> {
        if self.elem_count() == 0 {
            return Ok(Scale::ONE);
        }
        let of = norm_of(&self.data()?, norm)?;
        Ok(Scale::lenient(rescale_norm(of))?)
    }

    /// [`Scaled::dynamic_rescale`] of the value in the forward pass, or of its cotangent in the backward pass; the other stays unchanged.
    pub fn rescale(&self, norm: Norm, direction: Direction) -> Result<Self> {
        match direction {
            Direction::Forward => self.dynamic_rescale(norm),
            Direction::Backward => {
                Ok(self.recorded(self.detach(), "rescale", move |g| g.dynamic_rescale(norm)))
            }
        }
    }

    /// Casts the value in the forward pass only: the cotangent keeps the dtype that it would have without the cast. Unlike the original
    /// library, this casts under differentiation too.
    pub fn cast_on_forward(&self, dtype: impl Into<ScaledDType>) -> Result<Self> {
        let value = self.detach().astype(dtype)?;
        let like = super::arith::Like::of(self);
        Ok(self.recorded(value, "cast_on_forward", move |g| like.cotangent(g)))
    }

    /// Casts the cotangent in the backward pass only: the value stays as it is.
    pub fn cast_on_backward(&self, dtype: impl Into<ScaledDType>) -> Result<Self> {
        let dtype = dtype.into();
        Ok(self.recorded(self.detach(), "cast_on_backward", move |g| {
            g.detach().astype(dtype)
        }))
    }
}

/// In which pass a rescaling acts.
///
/// ```
/// # use candle_core::{Device, Tensor};
/// # use fp8_scaled::*;
/// let x = as_scaled(&Tensor::new(&[1f32, -4.0], &Device::Cpu)?, 2.0)?;
/// // Nothing moves in the forward pass; the backward pass rescales the cotangent.
/// assert_eq!(x.rescale(Norm::Max, Direction::Backward)?.scale(), x.scale());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Direction {
    /// On values.
    Forward,
    /// On cotangents.
    Backward,
}
