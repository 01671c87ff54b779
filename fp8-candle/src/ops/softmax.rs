//! Softmax over the last dimension, plain and with a causal mask.

use super::fused;
use crate::base::check::{check_dims, check_float, check_like, last_dim};
use crate::base::error::{Result, shape_error};
use crate::base::math::{Real, max, sum, sum2};
use crate::base::profile::{Kind, enter};
use crate::base::simd::simd;
use crate::device::cpu::elements::{
    compute_dtype, for_dtype, map_rows, storage, tensor, with_slices,
};
#[cfg(feature = "cuda")]
use crate::device::cuda::ops::softmax as cuda;
use crate::graph::{Ready, attach};
use candle_core::{D, Storage, Tensor};

/// Softmax over the last dimension.
///
/// ```text
/// y_i = exp(x_i - max(x)) / sum_j exp(x_j - max(x))
/// ```
///
/// # Shapes
/// `x` `[.., n]`, result the same.
///
/// # Errors
/// If `x` has no dimension or is not f32, bf16, f16 or f64.
///
/// # Source
/// Bridle, "Probabilistic Interpretation of Feedforward Classification Network Outputs", 1990. The gradient
/// `y * (g - sum(g * y))` needs only the result.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::new(&[[1f32, 1.0], [0.0, f32::NEG_INFINITY]], &Device::Cpu)?;
/// let y = fp8_candle::ops::softmax_last_dim(&x)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[0.5, 0.5], [1.0, 0.0]]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn softmax_last_dim(x: &Tensor) -> Result<Tensor> {
    Softmax::new("softmax_last_dim", None, 1.0).apply(x)
}

/// The probabilities of causal attention: multiplies logits by `softmax_scale`, hides the keys after each query, and takes
/// the softmax over the keys, in one pass.
///
/// ```text
/// y[.., i, j] = softmax_j(softmax_scale * x[.., i, j])    where j <= i + tk - tq
/// y[.., i, j] = 0                                            elsewhere
/// ```
///
/// So the last query sees every key, and `tk > tq` means that `tk - tq` cached keys come before the queries. Hidden logits
/// are never read: a NaN among them has no effect, and their gradient is 0. `softmax_scale` is usually
/// `1 / sqrt(head_dim)`.
///
/// # Shapes
/// `x` `[.., tq, tk]` with `tk >= tq`, result the same.
///
/// # Errors
/// If `x` has fewer than two dimensions, fewer keys than queries, or is not f32, bf16, f16 or f64.
///
/// # Source
/// Vaswani et al., "Attention Is All You Need", section 3.2, arXiv:1706.03762.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device, Tensor};
///
/// let logits = Tensor::zeros((2, 2), DType::F32, &Device::Cpu)?;
/// let y = fp8_candle::ops::causal_softmax(&logits, 0.125)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[1.0, 0.0], [0.5, 0.5]]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn causal_softmax(x: &Tensor, softmax_scale: f64) -> Result<Tensor> {
    let op = "causal_softmax";
    let sizes = queries_and_keys(op, "x", x)?;
    Softmax::new(op, Some(sizes), softmax_scale).apply(x)
}

/// The sizes of a causal mask.
fn queries_and_keys(op: &'static str, what: &'static str, x: &Tensor) -> Result<(usize, usize)> {
    match *x.dims() {
        [.., tq, tk] if tk >= tq => Ok((tq, tk)),
        _ => {
            let expected = "[.., queries, keys] with at least as many keys as queries";
            Err(shape_error(op, what, expected, x.dims()))
        }
    }
}

/// `softmax(softmax_scale * x)` over the last dimension, with a causal mask if `causal`.
///
/// # Errors
/// As [`softmax_last_dim`] and [`causal_softmax`].
pub fn forward(x: &Tensor, causal: bool, softmax_scale: f64) -> Result<Tensor> {
    let x = x.detach();
    match causal {
        true => causal_softmax(&x, softmax_scale),
        false => Softmax::new("softmax", None, softmax_scale).apply(&x),
    }
}

/// `factor` times the gradient of the argument of the softmax whose result is `y`.
///
/// # Errors
/// If `y` is no result of [`forward`], `grad` does not have its shape, dtype and device, or a device fails.
pub fn backward(y: &Tensor, grad: &Tensor, causal: bool, factor: f64) -> Result<Tensor> {
    let (op, what) = ("softmax", "the result");
    check_float(op, what, y)?;
    last_dim(op, what, y)?;
    let causal = match causal {
        true => Some(queries_and_keys(op, what, y)?),
        false => None,
    };
    check_like(op, "the gradient", grad, y)?;
    check_dims(op, "the gradient", grad, y.dims())?;
    let _scope = enter(Kind::Attention);
    if fused(y) {
        let softmax = Softmax::new(op, causal, factor);
        return softmax.gradient(&y.contiguous()?, &grad.contiguous()?);
    }
    let dtype = y.dtype();
    let wide = |x: &Tensor| x.to_dtype(compute_dtype(dtype));
    let (y, grad) = (wide(y)?, wide(grad)?);
    let dot = (&y * &grad)?.sum_keepdim(D::Minus1)?;
    Ok(((y * grad.broadcast_sub(&dot)?)? * factor)?.to_dtype(dtype)?)
}

#[derive(Debug, Clone, Copy)]
struct Softmax {
    op: &'static str,
    /// Queries and keys of each matrix.
    causal: Option<(usize, usize)>,
    softmax_scale: f64,
}

impl Softmax {
    fn new(op: &'static str, causal: Option<(usize, usize)>, softmax_scale: f64) -> Self {
        Self {
            op,
            causal,
            softmax_scale,
        }
    }

    fn apply(self, x: &Tensor) -> Result<Tensor> {
        check_float(self.op, "x", x)?;
        last_dim(self.op, "x", x)?;
        if !fused(x) {
            return self.composed(x);
        }
        let x = x.contiguous()?;
        let result = Ready::new(self.probabilities(&x)?, x.shape())?;
        attach(self.op, [&x], result, move |_, y, grad| {
            let _scope = enter(Kind::Attention);
            Ok([Some(self.gradient(y, &grad.contiguous()?)?)])
        })
    }

    /// The result for a contiguous `x`, by kernels.
    fn probabilities(self, x: &Tensor) -> Result<Storage> {
        let _scope = enter(Kind::Attention);
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            let queries = self.causal.map(|(queries, _)| queries);
            return cuda::forward(x, queries, self.softmax_scale);
        }
        crate::base::simd::check()?;
        let cols = x.dim(D::Minus1)?;
        for_dtype!(self.op, x.dtype(), T => {
            with_slices([x], |x: [&[T]; 1]| {
                storage(map_rows(x, cols, |row, [x], y| self.forward(row, cols, x, y)))
            })
        })
    }

    /// The gradient of x from the result `y`, by kernels; both tensors are contiguous.
    fn gradient(self, y: &Tensor, grad: &Tensor) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if y.device().is_cuda() {
            let queries = self.causal.map(|(queries, _)| queries);
            return cuda::backward(y, grad, queries, self.softmax_scale);
        }
        let cols = y.dim(D::Minus1)?;
        for_dtype!(self.op, y.dtype(), T => {
            with_slices([y, grad], |[y_values, grad]: [&[T]; 2]| {
                let dx = map_rows([y_values, grad], cols, |row, [y, grad], dx| {
                    self.backward(row, y, grad, dx, cols);
                });
                tensor(dx, y.shape())
            })?
        })
    }

    fn composed(self, x: &Tensor) -> Result<Tensor> {
        if x.elem_count() == 0 {
            return Ok(x.clone());
        }
        let dtype = x.dtype();
        let x = x.contiguous()?.to_dtype(compute_dtype(dtype))?;
        let mut x = (x * self.softmax_scale)?;
        let constant = |value: f64, like: &Tensor| {
            let value = Tensor::new(value, like.device())?.to_dtype(like.dtype())?;
            value.broadcast_as(like.shape())
        };
        let mut visible = None;
        if let Some((tq, tk)) = self.causal {
            let mask: Vec<u8> = (0..tq)
                .flat_map(|i| (0..tk).map(move |j| u8::from(j <= i + tk - tq)))
                .collect();
            let mask = Tensor::from_vec(mask, (tq, tk), x.device())?.broadcast_as(x.shape())?;
            x = mask.where_cond(&x, &constant(f64::NEG_INFINITY, &x)?)?;
            visible = Some(mask);
        }
        // The maximum cancels, so no gradient goes through it.
        let e = x
            .broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?
            .exp()?;
        let mut y = e.broadcast_div(&e.sum_keepdim(D::Minus1)?)?;
        if let Some(visible) = visible {
            // Nor through hidden results, even if they are NaN.
            y = visible.where_cond(&y, &constant(0.0, &y)?)?;
        }
        Ok(y.to_dtype(dtype)?)
    }

    /// How many columns are visible to row `row` of the flat `[rows, cols]` matrix.
    #[inline(always)]
    fn visible(&self, row: usize, cols: usize) -> usize {
        match self.causal {
            Some((tq, tk)) => row % tq + tk - tq + 1,
            None => cols,
        }
    }

    fn forward<R: Real>(&self, first_row: usize, cols: usize, x: &[R], y: &mut [R]) {
        let softmax_scale = R::from_f64(self.softmax_scale);
        simd(
            #[inline(always)]
            || {
                for (row, (x, y)) in x
                    .chunks_exact(cols)
                    .zip(y.chunks_exact_mut(cols))
                    .enumerate()
                {
                    let visible = self.visible(first_row + row, cols);
                    let (y, hidden) = y.split_at_mut(visible);
                    softmax_row(&x[..visible], softmax_scale, y);
                    hidden.fill(R::ZERO);
                }
            },
        );
    }

    fn backward<R: Real>(&self, first_row: usize, y: &[R], grad: &[R], dx: &mut [R], cols: usize) {
        let softmax_scale = R::from_f64(self.softmax_scale);
        simd(
            #[inline(always)]
            || {
                let rows = y.chunks_exact(cols).zip(grad.chunks_exact(cols));
                for (row, ((y, grad), dx)) in rows.zip(dx.chunks_exact_mut(cols)).enumerate() {
                    let visible = self.visible(first_row + row, cols);
                    let (dx, hidden) = dx.split_at_mut(visible);
                    let (y, grad) = (&y[..visible], &grad[..visible]);
                    let dot = sum2(y, grad, |y, grad| y * grad);
                    for ((dx, &y), &grad) in dx.iter_mut().zip(y).zip(grad) {
                        *dx = y * (grad - dot) * softmax_scale;
                    }
                    hidden.fill(R::ZERO);
                }
            },
        );
    }
}

/// `y = softmax(softmax_scale * x)`.
#[inline(always)]
pub(super) fn softmax_row<R: Real>(x: &[R], softmax_scale: R, y: &mut [R]) {
    let largest = max(x, |x| x * softmax_scale);
    for (y, &x) in y.iter_mut().zip(x) {
        *y = (x * softmax_scale - largest).exp();
    }
    let factor = R::ONE / sum(y, |y| y);
    for y in y.iter_mut() {
        *y = *y * factor;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::test_support::{DTYPES, assert_same_as_composed, wave};
    use fp8_test_support::models::Model;

    #[test]
    fn fused_equals_composed() -> Result<()> {
        for dtype in DTYPES {
            let plain = Softmax::new("softmax", None, 1.0);
            let x = (wave(&[2, 131, 77], 1) * 6.0)?;
            assert_same_as_composed(
                dtype,
                &[x],
                &Model::Softmax(77),
                |a| plain.apply(&a[0]),
                |a| plain.composed(&a[0]),
            )?;
            for (tq, tk) in [(1, 1), (1, 9), (35, 35), (33, 70), (7, 8)] {
                let causal = Softmax::new("softmax", Some((tq, tk)), 0.35);
                let x = (wave(&[2, 3, tq, tk], 1) * 9.0)?;
                assert_same_as_composed(
                    dtype,
                    &[x],
                    &Model::CausalSoftmax([tq, tk], 0.35),
                    |a| causal.apply(&a[0]),
                    |a| causal.composed(&a[0]),
                )?;
            }
        }
        Ok(())
    }
}
