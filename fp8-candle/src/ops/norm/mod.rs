//! LayerNorm and RMSNorm over the last dimension.

mod cpu;
#[cfg(test)]
mod tests;

use super::fused;
use crate::base::check::{
    check_device, check_dims, check_dtype, check_float, check_like, last_dim,
};
use crate::base::data::made::Made;
use crate::base::error::Result;
use crate::base::profile::{Kind, enter};
use crate::cast::quantizer::Quantizer;
use crate::cast::tensor::{Fp8Tensor, Quantized};
use crate::cast::weight_version::Seen;
use crate::device::cpu::elements::{
    Element, compute_dtype, for_dtype, storage, tensor, with_slices,
};
use crate::device::made_casts;
use crate::graph::{Ready, attach_all};
use candle_core::{D, DType, Storage, Tensor, WithDType};

/// Layer normalization over the last dimension.
///
/// ```text
/// y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
/// ```
///
/// `var` is the biased variance, `mean((x - mean(x))^2)`.
///
/// # Shapes
/// `x` `[.., d]`, `weight` and `bias` `[d]`, result `[.., d]` in the dtype of `x`. `weight` and `bias` have that dtype too, or both are
/// f32; the CPU then computes with them as they are, other devices round them to it.
///
/// # Errors
/// If `x` has no dimension or is not f32, bf16, f16 or f64, or if `weight` or `bias` have another dtype or
/// device or are not `[d]`.
///
/// # Source
/// Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device, Tensor};
///
/// let x = Tensor::new(&[[1f32, 3.0]], &Device::Cpu)?;
/// let weight = Tensor::ones(2, DType::F32, &Device::Cpu)?;
/// let y = fp8_candle::ops::layer_norm(&x, &weight, None, 0.0)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[-1.0, 1.0]]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    Norm { center: true, eps }.apply(x, weight, bias)
}

/// Root mean square normalization over the last dimension.
///
/// ```text
/// y = x / sqrt(mean(x^2) + eps) * weight
/// ```
///
/// # Shapes
/// `x` `[.., d]`, `weight` `[d]`, result `[.., d]` in the dtype of `x`. `weight` has that dtype too, or is f32: see [`layer_norm`].
///
/// # Errors
/// If `x` has no dimension or is not f32, bf16, f16 or f64, or if `weight` has another dtype or device
/// or is not `[d]`.
///
/// # Source
/// Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::new(&[[2f32, -2.0]], &Device::Cpu)?;
/// let weight = Tensor::new(&[1f32, 3.0], &Device::Cpu)?;
/// let y = fp8_candle::ops::rms_norm(&x, &weight, 0.0)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[1.0, -3.0]]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    Norm { center: false, eps }.apply(x, weight, None)
}

/// LayerNorm with `center`, RMSNorm without, of `x` `[.., d]`, `weight` and `bias` `[d]`.
///
/// # Errors
/// As [`layer_norm`] and [`rms_norm`].
pub fn forward(
    center: bool,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    Norm { center, eps }.detached(x, weight, bias)
}

/// The gradients of x, weight and bias of the norm of `x`; the latter two, which are sums over rows, times `sums_factor`.
///
/// # Errors
/// If shapes, dtypes or devices do not fit, as in [`layer_norm`] and [`rms_norm`], or a device fails.
pub fn backward(
    center: bool,
    x: &Tensor,
    weight: &Tensor,
    grad: &Tensor,
    eps: f64,
    sums_factor: f64,
) -> Result<[Tensor; 3]> {
    let norm = Norm { center, eps };
    norm.check(x, weight, None)?;
    check_like(norm.op(), "the gradient", grad, x)?;
    check_dims(norm.op(), "the gradient", grad, x.dims())?;
    norm.backward(x, weight, grad, sums_factor)
}

/// A norm: its function, without its parameters.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Norm {
    /// Subtract the mean: LayerNorm, else RMSNorm.
    pub(crate) center: bool,
    pub(crate) eps: f64,
}

impl Norm {
    /// The name in messages.
    pub(crate) fn op(self) -> &'static str {
        match self.center {
            true => "layer_norm",
            false => "rms_norm",
        }
    }

    /// The result for tensors outside any graph.
    pub(crate) fn detached(
        self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        let bias = bias.map(Tensor::detach);
        self.apply(&x.detach(), &weight.detach(), bias.as_ref())
    }

    /// Whether [`Norm::cast_rows`] can take `x`. Fails where [`Norm::detached`] would.
    pub(crate) fn casts_rows(
        self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<bool> {
        self.check(x, weight, bias)?;
        let kernel = made_casts(x.device()).is_some() && x.is_contiguous();
        let serves = x.device().is_cpu() || kernel && weight.dtype() == x.dtype();
        Ok(serves && fused(x) && x.elem_count() > 0)
    }

    /// The cast of [`Norm::detached`], whose rows are cast as they are made; see [`Quantizer::quantize_rows`]. If the device does that in
    /// the same pass, also the codes of `x` in groups of `keep` features.
    pub(crate) fn cast_rows(
        self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        (quantizer, both): (&Quantizer, bool),
        keep: Option<usize>,
    ) -> Result<Option<(Quantized, Option<Fp8Tensor>)>> {
        let _scope = enter(Kind::Norm);
        if !x.device().is_cpu() {
            let Self { center, eps } = self;
            let made = Made::Norm {
                center,
                x,
                weight,
                bias,
                eps,
            };
            let cast = quantizer.quantize_made(&made, both)?;
            return Ok(cast.map(|cast| (cast, None)));
        }
        for_dtype!(self.op(), x.dtype(), T => {
            let (weight, bias) = (parameter::<T>(weight)?, bias.map(parameter::<T>).transpose()?);
            with_slices([x], |[values]: [&[T]; 1]| {
                let made = |start: usize, y: &mut [T]| {
                    self.rows(values, &weight, bias.as_deref(), start, y);
                };
                quantizer.quantize_and_keep(x.dims(), &made, (values, x.dims()), keep)
            })?
        })
    }

    /// The gradients of x, weight and bias outside any graph; the latter two, which are sums over rows, times `sums_factor`.
    pub(crate) fn backward(
        self,
        x: &Tensor,
        weight: &Tensor,
        grad: &Tensor,
        sums_factor: f64,
    ) -> Result<[Tensor; 3]> {
        let _scope = enter(Kind::Norm);
        if x.device().is_cpu() {
            return self.cpu_gradients(x, weight, grad, sums_factor);
        }
        let dtype = x.dtype();
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() && fused(x) {
            let own = weight.dtype();
            let (x, weight) = (x.contiguous()?, weight.to_dtype(dtype)?.contiguous()?);
            let (grad, cuda) = (grad.to_dtype(dtype)?.contiguous()?, self.on_cuda());
            let statistics = cuda.statistics(&x, &weight)?;
            let dx = cuda.backward(&x, &weight, &grad, &statistics)?;
            let (dw, db) = cuda.parameter_gradients(&x, &weight, &grad, &statistics, true)?;
            let Some(db) = db else {
                crate::base::error::internal!("{}: no gradient of the bias", self.op());
            };
            let [dw, db] = match sums_factor == 1. {
                true => [dw, db],
                false => [(dw * sums_factor)?, (db * sums_factor)?],
            };
            return Ok([dx, dw.to_dtype(own)?, db.to_dtype(own)?]);
        }
        let bias = weight.zeros_like()?;
        let [dx, dw, db] = super::gradients([x, weight, &bias], grad, |[x, weight, bias]| {
            self.composed(x, weight, Some(bias))
        })?;
        let of_parameter = |sum: Tensor| (sum * sums_factor)?.to_dtype(weight.dtype());
        Ok([dx.to_dtype(dtype)?, of_parameter(dw)?, of_parameter(db)?])
    }

    fn check(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<()> {
        check_float(self.op(), "x", x)?;
        let d = last_dim(self.op(), "x", x)?;
        for (what, parameter) in [("weight", Some(weight)), ("bias", bias)] {
            let Some(parameter) = parameter else { continue };
            check_device(self.op(), what, parameter, x.device())?;
            let as_x = parameter.dtype() == x.dtype() || x.dtype() == DType::F64;
            let expected = if as_x { x.dtype() } else { DType::F32 };
            check_dtype(self.op(), what, parameter, expected)?;
            check_dtype(self.op(), what, parameter, weight.dtype())?;
            check_dims(self.op(), what, parameter, &[d])?;
        }
        Ok(())
    }

    fn apply(self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        self.check(x, weight, bias)?;
        if !fused(x) {
            return self.composed(x, weight, bias);
        }
        if !x.device().is_cpu() && weight.dtype() != x.dtype() {
            let bias = bias.map(|bias| bias.to_dtype(x.dtype())).transpose()?;
            return self.apply(x, &weight.to_dtype(x.dtype())?, bias.as_ref());
        }
        let (x, weight) = (x.contiguous()?, weight.contiguous()?);
        let bias = bias.map(Tensor::contiguous).transpose()?;
        // The gradient of x needs the weight again.
        let seen = x.track_op().then(|| Seen::of(&weight)).transpose()?;
        let (result, statistics) = self.computed(&x, &weight, bias.as_ref())?;
        let args: Vec<&Tensor> = [&x, &weight].into_iter().chain(&bias).collect();
        let result = Ready::new(result, x.shape())?;
        attach_all(self.op(), &args, result, move |args, _, grad| {
            let _scope = enter(Kind::Norm);
            let [x, weight, ref bias @ ..] = *args else {
                crate::base::error::internal!("{}: {} arguments", self.op(), args.len());
            };
            let bias = bias.first().copied();
            let grad = grad.contiguous()?;
            let gradients = self.gradients(x, weight, bias, &grad, statistics.as_ref())?;
            if let Some(seen) = &seen {
                seen.check(weight, self.op(), "weight")?;
            }
            Ok(gradients)
        })
    }

    /// The result by kernels, and what they keep for the backward pass.
    fn computed(
        self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<(Storage, Option<Tensor>)> {
        let _scope = enter(Kind::Norm);
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            let args = [Some(x), Some(weight), bias];
            let keep = args.iter().flatten().any(|arg| arg.track_op());
            return self.on_cuda().forward(x, weight, bias, keep);
        }
        crate::base::simd::check()?;
        let y = for_dtype!(self.op(), x.dtype(), T => {
            let (weight, bias) = (parameter::<T>(weight)?, bias.map(parameter::<T>).transpose()?);
            with_slices([x], |[x]: [&[T]; 1]| {
                storage(self.cpu_forward(x, &weight, bias.as_deref()))
            })
        })?;
        Ok((y, None))
    }

    /// The gradients of the arguments that are part of a graph, as many as there are arguments.
    fn gradients(
        self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        grad: &Tensor,
        statistics: Option<&Tensor>,
    ) -> Result<Vec<Option<Tensor>>> {
        let arguments = 2 + usize::from(bias.is_some());
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            let Some(statistics) = statistics else {
                crate::base::error::internal!(
                    "{}: the forward pass kept nothing for a gradient",
                    self.op()
                );
            };
            let mut gradients = vec![None; arguments];
            let norm = self.on_cuda();
            if x.track_op() {
                gradients[0] = Some(norm.backward(x, weight, grad, statistics)?);
            }
            let with_bias = bias.is_some_and(|bias| bias.track_op());
            if weight.track_op() || with_bias {
                let (dw, db) = norm.parameter_gradients(x, weight, grad, statistics, with_bias)?;
                gradients[1] = weight.track_op().then_some(dw);
                if let (Some(last), true) = (gradients.get_mut(2), with_bias) {
                    *last = db;
                }
            }
            return Ok(gradients);
        }
        let _ = statistics;
        let gradients = self.cpu_gradients(x, weight, grad, 1.0)?;
        let tracked = [Some(x), Some(weight), bias].map(|arg| arg.is_some_and(Tensor::track_op));
        let gradients = gradients.into_iter().zip(tracked).take(arguments);
        Ok(gradients
            .map(|(grad, tracked)| tracked.then_some(grad))
            .collect())
    }

    #[cfg(feature = "cuda")]
    fn on_cuda(self) -> crate::device::cuda::ops::norm::Norm {
        let Self { center, eps } = self;
        let op = self.op();
        crate::device::cuda::ops::norm::Norm { op, center, eps }
    }

    /// Gradients of x, weight and bias.
    fn cpu_gradients(
        &self,
        x: &Tensor,
        weight: &Tensor,
        grad: &Tensor,
        sums_factor: f64,
    ) -> Result<[Tensor; 3]> {
        for_dtype!(self.op(), x.dtype(), T => {
            let values = parameter::<T>(weight)?;
            with_slices([x, grad], |[x_values, grad]: [&[T]; 2]| {
                let (dx, sums) = self.cpu_backward(x_values, &values, grad, sums_factor);
                let [dw, db] = sums.map(|sums| tensor(sums, weight.shape())?.to_dtype(weight.dtype()));
                Ok([tensor(dx, x.shape())?, dw?, db?])
            })?
        })
    }

    /// The definition in candle's operations.
    fn composed(self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (dtype, compute) = (x.dtype(), compute_dtype(x.dtype()));
        let mut x = x.contiguous()?.to_dtype(compute)?;
        if self.center {
            x = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        }
        let std = (x.sqr()?.mean_keepdim(D::Minus1)? + self.eps)?.sqrt()?;
        let mut y = x
            .broadcast_div(&std)?
            .broadcast_mul(&weight.to_dtype(compute)?)?;
        if let Some(bias) = bias {
            y = y.broadcast_add(&bias.to_dtype(compute)?)?;
        }
        Ok(y.to_dtype(dtype)?)
    }
}

/// The values of a parameter, in the type in which kernels for `T` compute.
fn parameter<T: Element>(parameter: &Tensor) -> Result<Vec<T::Real>> {
    let values = parameter.to_dtype(T::Real::DTYPE)?;
    Ok(values.flatten_all()?.to_vec1()?)
}
