//! The activations of feed-forward networks, gated or not.

mod curve;
mod erf;
#[cfg(test)]
mod tests;

use super::data::{Element, compute_dtype, for_dtype, map_rows, tensor, with_slices};
use super::{check_float, fused, last_dim, shape_error};
use crate::data::made::Made;
#[cfg(feature = "cuda")]
use crate::device::cuda::ops::activation as cuda;
use crate::device::{filled, made_casts};
use crate::error::Result;
use crate::parallel;
use crate::profile::{Kind, enter};
use crate::quantize::{Quantized, Quantizer};
#[cfg(feature = "cuda")]
use crate::ready::tensor_of;
use candle_core::{D, Tensor};
use curve::Curve;
use std::fmt;
use std::str::FromStr;

const OP: &str = "activation";

/// The nonlinearity between the two projections of a feed-forward network.
///
/// The gated ones read twice as many features, the gate before the value: `f(x[.., ..n]) * x[.., n..]`.
///
/// ```
/// use fp8_candle::ops::Activation;
/// assert!(Activation::SwiGlu.is_gated() && !Activation::Gelu.is_gated());
/// assert_eq!("swiglu".parse(), Ok(Activation::SwiGlu)); // Transformer Engine's names
/// assert_eq!(Activation::SquaredRelu.to_string(), "srelu");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Activation {
    /// GELU, tanh approximation; candle_nn's `NewGelu`.
    #[default]
    Gelu,
    /// GELU by the error function, `x (1 + erf(x / sqrt 2)) / 2`; candle_nn's `Gelu`, and `gelu` of Hugging Face's configurations.
    GeluErf,
    /// `x sigmoid(1.702 x)`.
    QuickGelu,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)^2`.
    SquaredRelu,
    /// `x sigmoid(x)`.
    Silu,
    /// `sigmoid(gate) value`.
    Glu,
    /// `gelu(gate) value`, tanh approximation.
    GeGlu,
    /// `gelu_erf(gate) value`.
    GeGluErf,
    /// `quick_gelu(gate) value`.
    QuickGeGlu,
    /// `max(gate, 0) value`.
    ReGlu,
    /// `max(gate, 0)^2 value`.
    SquaredReGlu,
    /// `silu(gate) value`.
    SwiGlu,
}

/// All activations by Transformer Engine's names, and the two that it does not have.
const NAMES: [(Activation, &str); 13] = [
    (Activation::Gelu, "gelu"),
    (Activation::GeluErf, "gelu_erf"),
    (Activation::QuickGelu, "qgelu"),
    (Activation::Relu, "relu"),
    (Activation::SquaredRelu, "srelu"),
    (Activation::Silu, "silu"),
    (Activation::Glu, "glu"),
    (Activation::GeGlu, "geglu"),
    (Activation::GeGluErf, "geglu_erf"),
    (Activation::QuickGeGlu, "qgeglu"),
    (Activation::ReGlu, "reglu"),
    (Activation::SquaredReGlu, "sreglu"),
    (Activation::SwiGlu, "swiglu"),
];

impl Activation {
    /// All of them.
    ///
    /// ```
    /// # use fp8_candle::ops::Activation;
    /// assert_eq!(Activation::all().filter(|activation| activation.is_gated()).count(), 7);
    /// # Ok::<(), fp8_candle::Error>(())
    /// ```
    pub fn all() -> impl Iterator<Item = Self> {
        NAMES.into_iter().map(|(activation, _)| activation)
    }

    /// Whether it reads twice as many features as it gives.
    ///
    /// ```
    /// # use fp8_candle::ops::Activation;
    /// assert!(Activation::GeGlu.is_gated() && !Activation::Gelu.is_gated());
    /// # Ok::<(), fp8_candle::Error>(())
    /// ```
    pub fn is_gated(self) -> bool {
        matches!(
            self,
            Self::Glu
                | Self::GeGlu
                | Self::GeGluErf
                | Self::QuickGeGlu
                | Self::ReGlu
                | Self::SquaredReGlu
                | Self::SwiGlu
        )
    }

    /// The number of its function in kernels.
    #[cfg(feature = "cuda")]
    pub(crate) fn curve_id(self) -> u32 {
        match self.curve() {
            Curve::Gelu => 0,
            Curve::QuickGelu => 1,
            Curve::Relu => 2,
            Curve::SquaredRelu => 3,
            Curve::Silu => 4,
            Curve::Sigmoid => 5,
            Curve::GeluErf => 6,
        }
    }

    fn curve(self) -> Curve {
        match self {
            Self::Gelu | Self::GeGlu => Curve::Gelu,
            Self::GeluErf | Self::GeGluErf => Curve::GeluErf,
            Self::QuickGelu | Self::QuickGeGlu => Curve::QuickGelu,
            Self::Relu | Self::ReGlu => Curve::Relu,
            Self::SquaredRelu | Self::SquaredReGlu => Curve::SquaredRelu,
            Self::Silu | Self::SwiGlu => Curve::Silu,
            Self::Glu => Curve::Sigmoid,
        }
    }

    /// The result for `x` `[.., n]`, or `[.., 2n]` if it is gated: `[.., n]` of x's dtype, computed in f32 and rounded once.
    ///
    /// Differentiable: composed of candle's operations where a gradient is tracked.
    ///
    /// # Errors
    /// If `x` is not f32, bf16, f16 or f64, has no dimension, or an odd number of features where the activation is gated.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use fp8_candle::ops::Activation;
    /// let x = Tensor::new(&[[-1f32, 2., 10., 10.]], &Device::Cpu)?;
    /// assert_eq!(Activation::ReGlu.apply(&x)?.to_vec2::<f32>()?, [[0., 20.]]);
    /// # Ok::<(), fp8_candle::Error>(())
    /// ```
    pub fn apply(self, x: &Tensor) -> Result<Tensor> {
        let _scope = enter(Kind::Activation);
        self.check(x)?;
        match x.device() {
            _ if x.track_op() || !fused(x) => self.composed(x),
            #[cfg(feature = "cuda")]
            candle_core::Device::Cuda(_) => {
                let y = cuda::forward(self, &x.contiguous()?)?;
                tensor_of(y, self.result_dims(x.dims()))
            }
            _ => self.on_cpu(x),
        }
    }

    fn check(self, x: &Tensor) -> Result<()> {
        check_float(OP, "x", x)?;
        let last = last_dim(OP, "x", x)?;
        if self.is_gated() && !last.is_multiple_of(2) {
            let expected = format!("an even number of features for {self}");
            return Err(shape_error(OP, "x", expected, x));
        }
        Ok(())
    }

    /// The gradient of `x`, outside any graph.
    pub(crate) fn backward(self, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
        let _scope = enter(Kind::Activation);
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() && fused(x) {
            return cuda::backward(self, &x.contiguous()?, &grad.contiguous()?);
        }
        if !x.device().is_cpu() {
            let [dx] = super::gradients([x], grad, |[x]| self.composed(x))?;
            return Ok(dx.to_dtype(x.dtype())?);
        }
        crate::simd::check()?;
        for_dtype!(OP, x.dtype(), T => {
            with_slices([x, grad], |[values, grad]: [&[T]; 2]| {
                tensor(self.gradient(values, grad, x.dims().last().copied().unwrap_or(1)), x.shape())
            })?
        })
    }

    /// The shape of the result, if [`Activation::cast_rows`] serves `x`; an error if [`Activation::apply`] would be one.
    pub(crate) fn casts_rows(self, x: &Tensor) -> Result<Option<Vec<usize>>> {
        self.check(x)?;
        let serves = x.device().is_cpu() || made_casts(x.device()).is_some() && x.is_contiguous();
        Ok((serves && x.elem_count() > 0).then(|| self.result_dims(x.dims())))
    }

    fn result_dims(self, dims: &[usize]) -> Vec<usize> {
        let mut dims = dims.to_vec();
        if let (true, Some(dim)) = (self.is_gated(), dims.last_mut()) {
            *dim /= 2;
        }
        dims
    }

    /// The cast of the result, whose rows are cast as they are made; see [`Quantizer::quantize_rows`].
    pub(crate) fn cast_rows(
        self,
        x: &Tensor,
        quantizer: &Quantizer,
        both: bool,
    ) -> Result<Option<Quantized>> {
        let _scope = enter(Kind::Activation);
        let Some(dims) = self.casts_rows(x)? else {
            return Ok(None);
        };
        if !x.device().is_cpu() {
            let activation = self;
            return quantizer.quantize_made(&Made::Activation { activation, x }, both);
        }
        let last = last_dim(OP, "x", x)?;
        let n = dims.last().copied().unwrap_or(1);
        for_dtype!(OP, x.dtype(), T => {
            with_slices([x], |[x]: [&[T]; 1]| {
                quantizer.quantize_rows(&dims, |start, y: &mut [T]| {
                    self.part(input_of(x, start, y.len(), [last, n]), last, n, y)
                })
            })?
        })
    }

    /// A gated activation of gate and value in tensors of one shape and dtype, outside any graph.
    pub(crate) fn apply_to(self, gate: &Tensor, value: &Tensor) -> Result<Tensor> {
        self.check_pair(gate, value)?;
        #[cfg(feature = "cuda")]
        if gate.device().is_cuda() && fused(gate) {
            let y = cuda::forward_pair(self, &gate.contiguous()?, &value.contiguous()?)?;
            return tensor_of(y, gate.shape());
        }
        if !gate.device().is_cpu() {
            return self.composed_of(gate, value);
        }
        let curve = self.curve();
        for_dtype!(OP, gate.dtype(), T => {
            with_slices([gate, value], |slices: [&[T]; 2]| {
                let y = map_rows(slices, 1, |_, [gate, value], y| curve.gated(gate, value, y));
                tensor(y, gate.shape())
            })?
        })
    }

    /// The gradients of gate and value.
    pub(crate) fn backward_to(
        self,
        gate: &Tensor,
        value: &Tensor,
        grad: &Tensor,
    ) -> Result<[Tensor; 2]> {
        #[cfg(feature = "cuda")]
        if gate.device().is_cuda() && fused(gate) {
            let (gate, value) = (gate.contiguous()?, value.contiguous()?);
            return cuda::backward_pair(self, &gate, &value, &grad.contiguous()?);
        }
        if !gate.device().is_cpu() {
            let [dgate, dvalue] = super::gradients([gate, value], grad, |[gate, value]| {
                self.composed_of(gate, value)
            })?;
            return Ok([
                dgate.to_dtype(gate.dtype())?,
                dvalue.to_dtype(gate.dtype())?,
            ]);
        }
        let curve = self.curve();
        for_dtype!(OP, gate.dtype(), T => {
            with_slices([gate, value, grad], |slices: [&[T]; 3]| {
                let (mut dgate, mut dvalue) = (zeros::<T>(slices[0].len()), zeros::<T>(slices[0].len()));
                let outs = dgate.chunks_mut(TASK).zip(dvalue.chunks_mut(TASK));
                parallel::for_each(outs.enumerate(), |(task, (dgate, dvalue))| {
                    let mut buffers = [Vec::new(), Vec::new(), Vec::new()];
                    let [a, b, c] = &mut buffers;
                    let range = task * TASK..task * TASK + dgate.len();
                    let gate = T::load(&slices[0][range.clone()], a);
                    let value = T::load(&slices[1][range.clone()], b);
                    let grad = T::load(&slices[2][range], c);
                    T::store(dgate, |dgate| {
                        T::store(dvalue, |dvalue| curve.gated_gradient(gate, value, grad, dgate, dvalue));
                    });
                });
                Ok([tensor(dgate, gate.shape())?, tensor(dvalue, gate.shape())?])
            })?
        })
    }

    fn check_pair(self, gate: &Tensor, value: &Tensor) -> Result<()> {
        check_float(OP, "gate", gate)?;
        super::check_like(OP, "value", value, gate)?;
        crate::simd::check()?;
        if !self.is_gated() {
            let expected = format!("one tensor, since {self} is not gated");
            return Err(shape_error(OP, "value", expected, value));
        }
        if gate.dims() != value.dims() {
            let expected = format!("{:?}, as the gate", gate.dims());
            return Err(shape_error(OP, "value", expected, value));
        }
        Ok(())
    }

    fn composed_of(self, gate: &Tensor, value: &Tensor) -> Result<Tensor> {
        let wide = |x: &Tensor| x.to_dtype(compute_dtype(x.dtype()));
        let y = (self.curve().composed(&wide(gate)?)? * wide(value)?)?;
        Ok(y.to_dtype(gate.dtype())?)
    }

    fn on_cpu(self, x: &Tensor) -> Result<Tensor> {
        crate::simd::check()?;
        let (last, dims) = (last_dim(OP, "x", x)?, self.result_dims(x.dims()));
        for_dtype!(OP, x.dtype(), T => {
            with_slices([x], |[x]: [&[T]; 1]| tensor(self.values(x, last), dims))?
        })
    }

    fn composed(self, x: &Tensor) -> Result<Tensor> {
        let wide = x.to_dtype(compute_dtype(x.dtype()))?;
        let y = match self.is_gated() {
            false => self.curve().composed(&wide)?,
            true => {
                let n = last_dim(OP, "x", x)? / 2;
                let gate = wide.narrow(D::Minus1, 0, n)?.contiguous()?;
                let value = wide.narrow(D::Minus1, n, n)?.contiguous()?;
                (self.curve().composed(&gate)? * value)?
            }
        };
        Ok(y.to_dtype(x.dtype())?)
    }

    fn values<T: Element>(self, x: &[T], last: usize) -> Vec<T> {
        let n = if self.is_gated() { last / 2 } else { last };
        let rows = x.len().checked_div(last).unwrap_or(0);
        let per_task = rows_of_task(last);
        let (y, _) = filled(T::ZERO, rows * n, per_task * n, |start, y: &mut [T]| {
            self.part(input_of(x, start, y.len(), [last, n]), last, n, y);
        });
        y
    }

    /// The results of rows of `last` elements, `n` each.
    fn part<T: Element>(self, x: &[T], last: usize, n: usize, y: &mut [T]) {
        let (curve, gated) = (self.curve(), self.is_gated());
        let mut buffer = Vec::new();
        let x = T::load(x, &mut buffer);
        T::store(y, |y| match gated {
            false => curve.values(x, y),
            true => {
                for (x, y) in x.chunks_exact(last).zip(y.chunks_exact_mut(n)) {
                    curve.gated(&x[..n], &x[n..], y);
                }
            }
        });
    }

    fn gradient<T: Element>(self, x: &[T], grad: &[T], last: usize) -> Vec<T> {
        let (curve, gated) = (self.curve(), self.is_gated());
        let n = if gated { last / 2 } else { last };
        let per_task = rows_of_task(last);
        let (dx, _) = filled(T::ZERO, x.len(), per_task * last, |start, dx: &mut [T]| {
            let (mut x_buffer, mut grad_buffer) = (Vec::new(), Vec::new());
            let x = &x[start..start + dx.len()];
            let grad = input_of(grad, start, dx.len(), [n, last]);
            let (x, grad) = (T::load(x, &mut x_buffer), T::load(grad, &mut grad_buffer));
            T::store(dx, |dx| match gated {
                false => curve.gradient(x, grad, dx),
                true => {
                    let rows = x.chunks_exact(last).zip(grad.chunks_exact(n));
                    for ((x, grad), dx) in rows.zip(dx.chunks_exact_mut(last)) {
                        let (dgate, dvalue) = dx.split_at_mut(n);
                        curve.gated_gradient(&x[..n], &x[n..], grad, dgate, dvalue);
                    }
                }
            });
        });
        dx
    }
}

fn zeros<T: Element>(len: usize) -> Vec<T> {
    vec![<T as Element>::ZERO; len]
}

/// The rows of `x`, of `cols[0]` elements each, that belong to `len` elements from `start` on of rows of `cols[1]`.
fn input_of<T>(x: &[T], start: usize, len: usize, cols: [usize; 2]) -> &[T] {
    let [from, to] = cols.map(|cols| cols.max(1));
    &x[start / to * from..][..len / to * from]
}

/// Elements of one task.
const TASK: usize = 1 << 14;

/// Rows of one task.
fn rows_of_task(last: usize) -> usize {
    TASK.div_ceil(last.max(1))
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES.iter().find(|(activation, _)| activation == self);
        f.pad(name.map_or("", |(_, name)| name))
    }
}

impl FromStr for Activation {
    type Err = UnknownActivation;

    fn from_str(text: &str) -> Result<Self, UnknownActivation> {
        let found = NAMES.iter().find(|(_, name)| *name == text);
        let unknown = || UnknownActivation(text.to_string());
        found.map(|(activation, _)| *activation).ok_or_else(unknown)
    }
}

/// A name that no activation has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "no activation `{0}`: gelu, gelu_erf, qgelu, relu, srelu, silu, glu, geglu, geglu_erf, qgeglu, reglu, sreglu or swiglu"
)]
///
/// ```
/// # use fp8_candle::ops::Activation;
/// let unknown = "tanh".parse::<Activation>().unwrap_err();
/// assert!(unknown.to_string().starts_with("no activation `tanh`"));
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub struct UnknownActivation(pub String);
