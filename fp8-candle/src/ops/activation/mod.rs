//! The activations of feed-forward networks, gated or not, plain and of data with a scale.

mod cpu;
mod scaled;
#[cfg(test)]
mod tests;

pub(crate) use scaled::{scaled_curve, scaled_slope};

use super::fused;
use crate::base::activation::Activation;
use crate::base::check::{check_float, check_like, last_dim};
use crate::base::data::made::Made;
use crate::base::error::{Result, shape_error};
use crate::base::profile::{Kind, enter};
use crate::cast::kept::KeptTensor;
use crate::cast::quantizer::Quantizer;
use crate::cast::tensor::{Fp8Tensor, Quantized};
use crate::device::cpu::elements::compute_dtype;
#[cfg(feature = "cuda")]
use crate::device::cuda::ops::activation as cuda;
use crate::device::made_casts;
use crate::graph::{Ready, attach};
use candle_core::{D, DType, Storage, Tensor};

/// Gaussian error linear unit, tanh approximation, elementwise: the function of [`Tensor::gelu`].
///
/// ```text
/// gelu(x) = x / 2 * (1 + tanh(u)) = x * sigmoid(2 u)    u = sqrt(2 / pi) * (x + 0.044715 x^3)
/// ```
///
/// The sigmoid form is computed: unlike `1 + tanh(u)` it stays relatively accurate for negative `x`.
///
/// # Shapes
/// Any; the result has the shape of `x`.
///
/// # Errors
/// If `x` is not f32, bf16, f16 or f64.
///
/// # Source
/// Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", arXiv:1606.08415.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::new(&[-10f32, 0.0, 10.0], &Device::Cpu)?;
/// let y = fp8_candle::ops::gelu(&x)?.to_vec1::<f32>()?;
/// assert!(y[0].abs() < 1e-6);
/// assert_eq!(y[1..], [0.0, 10.0]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    Activation::Gelu.apply(x)
}

/// `silu(gate) * up`, elementwise: the gated linear unit of Llama, Mistral and Qwen.
///
/// ```text
/// y = gate * sigmoid(gate) * up
/// ```
///
/// # Shapes
/// `gate` and `up` of one shape and dtype; the result has them too.
///
/// # Errors
/// If `gate` is not f32, bf16, f16 or f64, or `up` differs from it in shape, dtype or device.
///
/// # Source
/// Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
///
/// let gate = Tensor::new(&[-100f32, 0.0, 100.0], &Device::Cpu)?;
/// let up = Tensor::new(&[2f32, 2.0, 2.0], &Device::Cpu)?;
/// let y = fp8_candle::ops::swiglu(&gate, &up)?;
/// assert_eq!(y.to_vec1::<f32>()?, [0.0, 0.0, 200.0]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    Activation::SwiGlu.apply_pair(gate, up)
}

impl Activation {
    /// The result for `x` `[.., n]`, or `[.., 2n]` if it is gated: `[.., n]` of x's dtype, computed in f32 and rounded once.
    ///
    /// Differentiable.
    ///
    /// # Errors
    /// If `x` is not f32, bf16, f16 or f64, has no dimension, or an odd number of features where the activation is gated.
    pub fn apply(self, x: &Tensor) -> Result<Tensor> {
        self.check(x)?;
        if !fused(x) {
            return self.composed(x);
        }
        let x = x.contiguous()?;
        let result = Ready::new(self.forward(&x)?, self.result_dims(x.dims()))?;
        attach(self.name(), [&x], result, move |[x], _, grad| {
            Ok([Some(self.backward(x, &grad.contiguous()?)?)])
        })
    }

    /// A gated activation of gate and value in tensors of one shape and dtype. Differentiable.
    ///
    /// # Errors
    /// If the activation is not gated, or the tensors differ in shape, dtype or device.
    pub fn apply_pair(self, gate: &Tensor, value: &Tensor) -> Result<Tensor> {
        self.check_pair(gate, value)?;
        if !fused(gate) {
            return self.composed_pair(gate, value);
        }
        let (gate, value) = (gate.contiguous()?, value.contiguous()?);
        let result = Ready::new(self.forward_pair(&gate, &value)?, gate.shape())?;
        attach(
            self.name(),
            [&gate, &value],
            result,
            move |[gate, value], _, grad| {
                let grads = self.backward_pair(gate, value, &grad.contiguous()?)?;
                Ok(grads.map(Some))
            },
        )
    }

    fn check(self, x: &Tensor) -> Result<()> {
        let op = self.name();
        check_float(op, "x", x)?;
        let is_odd = |last: usize| !last.is_multiple_of(2);
        match x.dims() {
            _ if !self.is_gated() => Ok(()),
            [.., last] if !is_odd(*last) => Ok(()),
            _ => Err(shape_error(op, "x", "an even number of features", x.dims())),
        }
    }

    fn check_pair(self, gate: &Tensor, value: &Tensor) -> Result<()> {
        let op = self.name();
        check_float(op, "gate", gate)?;
        check_like(op, "value", value, gate)?;
        if !self.is_gated() {
            let expected = format!("one tensor, since {self} is not gated");
            return Err(shape_error(op, "value", expected, value.dims()));
        }
        if gate.dims() != value.dims() {
            let expected = format!("{:?}, as the gate", gate.dims());
            return Err(shape_error(op, "value", expected, value.dims()));
        }
        Ok(())
    }

    /// The result for a contiguous `x`, by kernels.
    fn forward(self, x: &Tensor) -> Result<Storage> {
        let _scope = enter(Kind::Activation);
        match x.device() {
            #[cfg(feature = "cuda")]
            candle_core::Device::Cuda(_) => cuda::forward(self, x),
            _ => cpu::forward(self, x),
        }
    }

    fn forward_pair(self, gate: &Tensor, value: &Tensor) -> Result<Storage> {
        let _scope = enter(Kind::Activation);
        match gate.device() {
            #[cfg(feature = "cuda")]
            candle_core::Device::Cuda(_) => cuda::forward_pair(self, gate, value),
            _ => cpu::forward_pair(self, gate, value),
        }
    }

    /// The gradient of `x`, outside any graph.
    pub(crate) fn backward(self, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
        let _scope = enter(Kind::Activation);
        if !fused(x) {
            let [dx] = super::gradients([x], grad, |[x]| self.composed(x))?;
            return Ok(dx.to_dtype(x.dtype())?);
        }
        match x.device() {
            #[cfg(feature = "cuda")]
            candle_core::Device::Cuda(_) => {
                cuda::backward(self, &x.contiguous()?, &grad.contiguous()?)
            }
            _ => cpu::backward(self, x, grad),
        }
    }

    /// The gradients of gate and value, outside any graph.
    pub(crate) fn backward_pair(
        self,
        gate: &Tensor,
        value: &Tensor,
        grad: &Tensor,
    ) -> Result<[Tensor; 2]> {
        let _scope = enter(Kind::Activation);
        if !fused(gate) {
            let [dgate, dvalue] = super::gradients([gate, value], grad, |[gate, value]| {
                self.composed_pair(gate, value)
            })?;
            let dtype = gate.dtype();
            return Ok([dgate.to_dtype(dtype)?, dvalue.to_dtype(dtype)?]);
        }
        match gate.device() {
            #[cfg(feature = "cuda")]
            candle_core::Device::Cuda(_) => {
                let (gate, value) = (gate.contiguous()?, value.contiguous()?);
                cuda::backward_pair(self, &gate, &value, &grad.contiguous()?)
            }
            _ => cpu::backward_pair(self, gate, value, grad),
        }
    }

    /// The shape of the result, if [`Activation::cast_rows`] serves `x`; an error if [`Activation::apply`] would be one.
    pub(crate) fn casts_rows(self, x: &Tensor) -> Result<Option<Vec<usize>>> {
        self.check(x)?;
        let serves = x.device().is_cpu() || made_casts(x.device()).is_some() && x.is_contiguous();
        Ok((serves && x.elem_count() > 0).then(|| self.result_dims(x.dims())))
    }

    /// The cast of the result, whose rows are cast as they are made; see [`Quantizer::quantize_rows`]. If the device does that in the same
    /// pass, also the codes of `x` in groups of `keep` features.
    pub(crate) fn cast_rows(
        self,
        x: &Tensor,
        (quantizer, both): (&Quantizer, bool),
        keep: Option<usize>,
    ) -> Result<Option<(Quantized, Option<Fp8Tensor>)>> {
        let _scope = enter(Kind::Activation);
        let Some(dims) = self.casts_rows(x)? else {
            return Ok(None);
        };
        match x.device().is_cpu() {
            true => cpu::cast_rows(self, x, &dims, quantizer, keep),
            false => {
                let activation = self;
                let cast = quantizer.quantize_made(&Made::Activation { activation, x }, both)?;
                Ok(cast.map(|cast| (cast, None)))
            }
        }
    }

    /// The cast of [`Activation::backward`], whose rows are cast as they are made, and with `sum_rows` the sums over them in that dtype.
    pub(crate) fn cast_gradient(
        self,
        x: &KeptTensor,
        grad: &Tensor,
        (quantizer, both): (&Quantizer, bool),
        sum_rows: Option<DType>,
    ) -> Result<Option<(Quantized, Option<Tensor>)>> {
        let _scope = enter(Kind::Activation);
        match x.device().is_cpu() {
            true => cpu::cast_gradient(self, x, grad, quantizer, sum_rows),
            false => {
                let activation = self;
                let made = Made::ActivationGradient {
                    activation,
                    x: &x.get()?,
                    grad,
                };
                quantizer.quantize_and_sum(&made, both, sum_rows)
            }
        }
    }

    /// The definition in candle's operations.
    fn composed(self, x: &Tensor) -> Result<Tensor> {
        let wide = x.to_dtype(compute_dtype(x.dtype()))?;
        let y = match self.is_gated() {
            false => self.curve().composed(&wide)?,
            true => {
                let n = last_dim(self.name(), "x", x)? / 2;
                let gate = wide.narrow(D::Minus1, 0, n)?.contiguous()?;
                let value = wide.narrow(D::Minus1, n, n)?.contiguous()?;
                (self.curve().composed(&gate)? * value)?
            }
        };
        Ok(y.to_dtype(x.dtype())?)
    }

    fn composed_pair(self, gate: &Tensor, value: &Tensor) -> Result<Tensor> {
        let wide = |x: &Tensor| x.to_dtype(compute_dtype(x.dtype()));
        let y = (self.curve().composed(&wide(gate)?)? * wide(value)?)?;
        Ok(y.to_dtype(gate.dtype())?)
    }
}
