//! Softmax.

use super::check::check_dim;
use super::error::Result;
use super::kernels::wide;
use super::parts::{factored, sized};
use super::value::Scaled;
use candle_core::{D, Tensor};
use fp8_candle::ops::detached;
use fp8_candle::ops::elements::{Real, RowKernel, map_rows, max, sum};
use fp8_core::scaled::{Scale, constant_rule, mul_rule};

impl Scaled {
    /// Softmax of the value over `dim`. Scale: 1.
    ///
    /// # Errors
    /// If the dimension does not exist.
    pub fn softmax(&self, dim: usize) -> Result<Self> {
        let op = "softmax";
        check_dim(op, self, dim)?;
        let (x, scale) = sized(self)?;
        let data = along(&x, dim, |x| Ok(detached::softmax(x, false, scale)?))?;
        let value = Self::new(data.clone(), Scale::ONE);
        Ok(self.recorded(value, op, move |g| {
            let (y, g_data) = (turned(&data, dim)?, turned(&g.float(data.dtype())?, dim)?);
            let grad = turned(&detached::softmax_gradient(&y, &g_data, false, 1.0)?, dim)?;
            Self::new(grad, g.scale()).zeroed()
        }))
    }

    /// The logarithm of the softmax of the value over `dim`. Scale: 1.
    ///
    /// # Errors
    /// If the dimension does not exist.
    pub fn log_softmax(&self, dim: usize) -> Result<Self> {
        let op = "log_softmax";
        check_dim(op, self, dim)?;
        let (x, scale) = sized(self)?;
        let data = along(&x, dim, |x| log_softmax(x, scale))?;
        let value = Self::new(data.clone(), Scale::ONE);
        Ok(self.recorded(value, op, move |g| {
            let (y, g_data) = (turned(&data, dim)?, turned(&g.float(data.dtype())?, dim)?);
            let grad = turned(&log_softmax_gradient(&y, &g_data)?, dim)?;
            Self::new(grad, g.scale()).zeroed()
        }))
    }

    /// The probabilities of causal attention, as [`ops::causal_softmax`](fp8_candle::ops::causal_softmax): the softmax over the last
    /// dimension of `[.., queries, keys]`, of the value times `softmax_scale`, with the keys after each query hidden. Scale: 1.
    ///
    /// # Errors
    /// If there are fewer than two dimensions or fewer keys than queries.
    pub fn causal_softmax(&self, softmax_scale: f64) -> Result<Self> {
        let op = "causal_softmax";
        let (x, scale) = sized(self)?;
        let data = detached::softmax(&x, true, scale * softmax_scale)?;
        let value = Self::new(data.clone(), Scale::ONE);
        Ok(self.recorded(value, op, move |g| {
            // The constant follows the rule of multiplication.
            let (power, mantissa) = constant_rule(softmax_scale);
            let g_data = g.float(data.dtype())?;
            let grad = detached::softmax_gradient(&data, &g_data, true, mantissa.into())?;
            factored(op, &grad, &mul_rule(g.scale(), power))
        }))
    }
}

/// `x` with `dim` and the last dimension exchanged.
fn turned(x: &Tensor, dim: usize) -> Result<Tensor> {
    match dim + 1 == x.rank() {
        true => Ok(x.contiguous()?),
        false => Ok(x.transpose(dim, D::Minus1)?.contiguous()?),
    }
}

/// Applies `f`, which works along the last dimension, along `dim`.
fn along(x: &Tensor, dim: usize, f: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    turned(&f(&turned(x, dim)?)?, dim)
}

/// `log(softmax(scale * x))` over the last dimension.
fn log_softmax(x: &Tensor, scale: f64) -> Result<Tensor> {
    let cols = x.dim(D::Minus1)?;
    if !x.device().is_cpu() {
        return wide([x], |[x]| log_softmax_composed(x, scale));
    }
    Ok(map_rows(
        "log_softmax",
        [x],
        cols,
        &LogSoftmax { scale, cols },
    )?)
}

fn log_softmax_composed(x: &Tensor, scale: f64) -> Result<Tensor> {
    let x = (x * scale)?;
    let x = x.broadcast_sub(&x.max_keepdim(D::Minus1)?)?;
    Ok(x.broadcast_sub(&x.exp()?.sum_keepdim(D::Minus1)?.log()?)?)
}

struct LogSoftmax {
    scale: f64,
    cols: usize,
}

impl RowKernel<1> for LogSoftmax {
    #[inline(always)]
    fn rows<R: Real>(&self, [x]: [&[R]; 1], y: &mut [R]) {
        let scale = R::from_f64(self.scale);
        for (x, y) in x.chunks_exact(self.cols).zip(y.chunks_exact_mut(self.cols)) {
            let largest = max(x, |x| x * scale);
            let rest = sum(x, |x| (x * scale - largest).exp()).ln();
            for (y, &x) in y.iter_mut().zip(x) {
                *y = x * scale - largest - rest;
            }
        }
    }
}

/// `g - exp(y) * sum(g)` over the last dimension.
fn log_softmax_gradient(y: &Tensor, g: &Tensor) -> Result<Tensor> {
    let cols = y.dim(D::Minus1)?;
    if !y.device().is_cpu() {
        return wide([y, g], |[y, g]| log_softmax_gradient_composed(y, g));
    }
    Ok(map_rows(
        "log_softmax",
        [y, g],
        cols,
        &LogSoftmaxGradient { cols },
    )?)
}

fn log_softmax_gradient_composed(y: &Tensor, g: &Tensor) -> Result<Tensor> {
    let total = g.sum_keepdim(D::Minus1)?;
    Ok((g - y.exp()?.broadcast_mul(&total)?)?)
}

struct LogSoftmaxGradient {
    cols: usize,
}

impl RowKernel<2> for LogSoftmaxGradient {
    #[inline(always)]
    fn rows<R: Real>(&self, [y, g]: [&[R]; 2], dx: &mut [R]) {
        let rows = y.chunks_exact(self.cols).zip(g.chunks_exact(self.cols));
        for ((y, g), dx) in rows.zip(dx.chunks_exact_mut(self.cols)) {
            let total = sum(g, |g| g);
            for ((dx, &y), &g) in dx.iter_mut().zip(y).zip(g) {
                *dx = g - y.exp() * total;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::test_values;
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
