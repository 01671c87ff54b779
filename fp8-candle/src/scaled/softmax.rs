//! Softmax.

use super::kernels::wide;
use super::parts::{factored, sized};
use super::value::Scaled;
use crate::base::data::storage::tensor_of;
use crate::base::error::{Error, Result};
use crate::base::math::{Real, max, sum};
use crate::base::simd::simd;
use crate::device::cpu::elements::{for_dtype, map_rows, storage, with_slices};
use crate::ops::softmax;
use candle_core::{D, Tensor};
use fp8_core::scaled::{Scale, constant_rule, mul_rule};

impl Scaled {
    /// Softmax over `dim`, of the value. Scale: 1.
    ///
    /// # Errors
    /// If the dimension does not exist.
    pub fn softmax(&self, dim: usize) -> Result<Self> {
        let op = "softmax";
        check_dim(op, self, dim)?;
        let (x, scale) = sized(self)?;
        let data = along(&x, dim, |x| softmax::forward(x, false, scale))?;
        let value = Self::new(data.clone(), Scale::ONE);
        Ok(Self::record(value, op, [self], move |g, _| {
            let (y, g_data) = (turned(&data, dim)?, turned(&g.float(data.dtype())?, dim)?);
            let grad = turned(&softmax::backward(&y, &g_data, false, 1.0)?, dim)?;
            Ok([Some(Self::new(grad, g.scale()).zeroed()?)])
        }))
    }

    /// The logarithm of the softmax over `dim`, of the value. Scale: 1.
    ///
    /// # Errors
    /// If the dimension does not exist.
    pub fn log_softmax(&self, dim: usize) -> Result<Self> {
        let op = "log_softmax";
        check_dim(op, self, dim)?;
        let (x, scale) = sized(self)?;
        let data = along(&x, dim, |x| log_softmax(x, scale))?;
        let value = Self::new(data.clone(), Scale::ONE);
        Ok(Self::record(value, op, [self], move |g, _| {
            let (y, g_data) = (turned(&data, dim)?, turned(&g.float(data.dtype())?, dim)?);
            let grad = turned(&log_softmax_gradient(&y, &g_data)?, dim)?;
            Ok([Some(Self::new(grad, g.scale()).zeroed()?)])
        }))
    }

    /// The probabilities of causal attention, as [`ops::causal_softmax`](crate::ops::causal_softmax): the softmax over the last
    /// dimension of `[.., queries, keys]`, of the value times `softmax_scale`, with the keys after each query hidden. Scale: 1.
    ///
    /// # Errors
    /// If there are fewer than two dimensions or fewer keys than queries.
    pub fn causal_softmax(&self, softmax_scale: f64) -> Result<Self> {
        let op = "causal_softmax";
        let (x, scale) = sized(self)?;
        let data = softmax::forward(&x, true, scale * softmax_scale)?;
        let value = Self::new(data.clone(), Scale::ONE);
        Ok(Self::record(value, op, [self], move |g, _| {
            // The constant by the rule of multiplication.
            let (power, mantissa) = constant_rule(softmax_scale);
            let g_data = g.float(data.dtype())?;
            let grad = softmax::backward(&data, &g_data, true, mantissa.into())?;
            Ok([Some(factored(op, &grad, &mul_rule(g.scale(), power))?)])
        }))
    }
}

pub(super) fn check_dim(op: &'static str, x: &Scaled, dim: usize) -> Result<()> {
    match dim < x.rank() {
        true => Ok(()),
        false => Err(Error::Shape {
            op,
            what: "the operand",
            expected: format!("a dimension {dim}"),
            got: x.dims().to_vec(),
        }),
    }
}

/// `x` with `dim` in the place of the last dimension, and that one in its place.
fn turned(x: &Tensor, dim: usize) -> Result<Tensor> {
    match dim + 1 == x.rank() {
        true => Ok(x.contiguous()?),
        false => Ok(x.transpose(dim, D::Minus1)?.contiguous()?),
    }
}

/// `f`, which works along the last dimension, along `dim`.
fn along(x: &Tensor, dim: usize, f: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    turned(&f(&turned(x, dim)?)?, dim)
}

/// `log(softmax(scale * x))` over the last dimension.
fn log_softmax(x: &Tensor, scale: f64) -> Result<Tensor> {
    let cols = x.dim(D::Minus1)?;
    if !x.device().is_cpu() {
        return wide([x], |[x]| log_softmax_composed(x, scale));
    }
    crate::base::simd::check()?;
    for_dtype!("log_softmax", x.dtype(), T => {
        let values = with_slices([x], |x: [&[T]; 1]| map_rows(x, cols, |_, [x], y| {
            log_softmax_rows(x, scale, y, cols);
        }))?;
        tensor_of(storage::<T>(values), x.shape())
    })
}

fn log_softmax_composed(x: &Tensor, scale: f64) -> Result<Tensor> {
    let x = (x * scale)?;
    let x = x.broadcast_sub(&x.max_keepdim(D::Minus1)?)?;
    Ok(x.broadcast_sub(&x.exp()?.sum_keepdim(D::Minus1)?.log()?)?)
}

/// `g - exp(y) * sum(g)` over the last dimension.
fn log_softmax_gradient(y: &Tensor, g: &Tensor) -> Result<Tensor> {
    let cols = y.dim(D::Minus1)?;
    if !y.device().is_cpu() {
        return wide([y, g], |[y, g]| log_softmax_gradient_composed(y, g));
    }
    crate::base::simd::check()?;
    for_dtype!("log_softmax", y.dtype(), T => {
        let values = with_slices([y, g], |slices: [&[T]; 2]| map_rows(slices, cols, |_, [y, g], dx| {
            log_softmax_gradient_rows(y, g, dx, cols);
        }))?;
        tensor_of(storage::<T>(values), y.shape())
    })
}

fn log_softmax_gradient_composed(y: &Tensor, g: &Tensor) -> Result<Tensor> {
    let total = g.sum_keepdim(D::Minus1)?;
    Ok((g - y.exp()?.broadcast_mul(&total)?)?)
}

fn log_softmax_rows<R: Real>(x: &[R], scale: f64, y: &mut [R], cols: usize) {
    let scale = R::from_f64(scale);
    simd(
        #[inline(always)]
        || {
            for (x, y) in x.chunks_exact(cols).zip(y.chunks_exact_mut(cols)) {
                let largest = max(x, |x| x * scale);
                let rest = sum(x, |x| (x * scale - largest).exp()).ln();
                for (y, &x) in y.iter_mut().zip(x) {
                    *y = x * scale - largest - rest;
                }
            }
        },
    );
}

fn log_softmax_gradient_rows<R: Real>(y: &[R], g: &[R], dx: &mut [R], cols: usize) {
    simd(
        #[inline(always)]
        || {
            let rows = y.chunks_exact(cols).zip(g.chunks_exact(cols));
            for ((y, g), dx) in rows.zip(dx.chunks_exact_mut(cols)) {
                let total = sum(g, |g| g);
                for ((dx, &y), &g) in dx.iter_mut().zip(y).zip(g) {
                    *dx = g - y.exp() * total;
                }
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scaled::kernels::test_values;
    use candle_core::DType;

    #[test]
    fn kernels_equal_their_definitions() -> Result<()> {
        let x = test_values(1)?.reshape((20, 50))?;
        let g = test_values(2)?.reshape((20, 50))?;
        for (dtype, tolerance) in [(DType::F64, 1e-13), (DType::F32, 2e-6), (DType::F16, 2e-3)] {
            let (x, g) = (x.to_dtype(dtype)?, g.to_dtype(dtype)?);
            let y = log_softmax(&x, 2.0)?;
            let expected = wide([&x], |[x]| log_softmax_composed(x, 2.0))?;
            let grad = log_softmax_gradient(&y, &g)?;
            let expected_grad = wide([&y, &g], |[y, g]| log_softmax_gradient_composed(y, g))?;
            for (got, expected) in [(y, expected), (grad, expected_grad)] {
                let flat = |x: &Tensor| x.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
                let (got, expected) = (flat(&got)?, flat(&expected)?);
                let largest = expected.iter().fold(0f64, |a, b| a.max(b.abs()));
                for (got, expected) in got.iter().zip(&expected) {
                    assert!(
                        (got - expected).abs() <= tolerance * largest,
                        "{got} {expected}"
                    );
                }
            }
        }
        Ok(())
    }
}
