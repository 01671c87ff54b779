//! LayerNorm and RMSNorm over the last dimension.

use super::data::{
    Element, block_rows, compute_dtype, for_dtype, map_rows, par_blocks, slice, tensor, with_slices,
};
use super::math::{Real, sum, sum2};
use super::{check_float, check_like, fused, last_dim, shape_error};
use crate::simd::simd;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, CustomOp3, D, Layout, Result, Shape, Tensor, WithDType};

/// Layer normalization over the last dimension.
///
/// ```text
/// y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
/// ```
///
/// `var` is the biased variance, `mean((x - mean(x))^2)`.
///
/// # Shapes
/// `x` `[.., d]`, `weight` and `bias` `[d]`, result `[.., d]`. All have one dtype.
///
/// # Errors
/// If `x` has no dimension or is not f32, bf16, f16 or f64, or if `weight` or `bias` differ from it in dtype or
/// device or are not `[d]`.
///
/// # Source
/// Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    Norm {
        op: "layer_norm",
        center: true,
        eps,
    }
    .apply(x, weight, bias)
}

/// Root mean square normalization over the last dimension.
///
/// ```text
/// y = x / sqrt(mean(x^2) + eps) * weight
/// ```
///
/// # Shapes
/// `x` `[.., d]`, `weight` `[d]`, result `[.., d]`. Both have one dtype.
///
/// # Errors
/// If `x` has no dimension or is not f32, bf16, f16 or f64, or if `weight` differs from it in dtype or device
/// or is not `[d]`.
///
/// # Source
/// Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    Norm {
        op: "rms_norm",
        center: false,
        eps,
    }
    .apply(x, weight, None)
}

#[derive(Debug, Clone, Copy)]
struct Norm {
    op: &'static str,
    /// Subtract the mean.
    center: bool,
    eps: f64,
}

impl Norm {
    fn apply(self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        check_float(self.op, "x", x)?;
        let d = last_dim(self.op, "x", x)?;
        for (what, parameter) in [("weight", Some(weight)), ("bias", bias)] {
            let Some(parameter) = parameter else { continue };
            check_like(self.op, what, parameter, x)?;
            if parameter.dims() != [d] {
                return Err(shape_error(self.op, what, format!("[{d}]"), parameter));
            }
        }
        if !fused(x) {
            return self.composed(x, weight, bias);
        }
        let (x, weight) = (x.contiguous()?, weight.contiguous()?);
        match bias {
            Some(bias) => x.apply_op3(&weight, &bias.contiguous()?, self),
            None => x.apply_op2(&weight, self),
        }
    }

    fn composed(self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (dtype, compute) = (x.dtype(), compute_dtype(x.dtype()));
        let mut x = x.to_dtype(compute)?;
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
        y.to_dtype(dtype)
    }

    fn forward<T: Element>(&self, x: &[T], weight: &[T], bias: Option<&[T]>) -> Vec<T> {
        let cols = weight.len();
        let (mut weight_buffer, mut bias_buffer) = (Vec::new(), Vec::new());
        let weight = T::load(weight, &mut weight_buffer);
        let bias = bias.map(|bias| T::load(bias, &mut bias_buffer));
        map_rows([x], cols, |_, [x], y| {
            simd(
                #[inline(always)]
                || {
                    for (x, y) in x.chunks_exact(cols).zip(y.chunks_exact_mut(cols)) {
                        self.forward_row(x, weight, bias, y);
                    }
                },
            );
        })
    }

    #[inline(always)]
    fn forward_row<R: Real>(&self, x: &[R], weight: &[R], bias: Option<&[R]>, y: &mut [R]) {
        let (mean, inv_std) = self.statistics(x);
        let rows = y.iter_mut().zip(x).zip(weight);
        match bias {
            Some(bias) => {
                for (((y, &x), &weight), &bias) in rows.zip(bias) {
                    *y = ((x - mean) * inv_std).mul_add(weight, bias);
                }
            }
            None => {
                for ((y, &x), &weight) in rows {
                    *y = (x - mean) * inv_std * weight;
                }
            }
        }
    }

    /// Mean (0 for RMSNorm) and reciprocal standard deviation.
    #[inline(always)]
    fn statistics<R: Real>(&self, x: &[R]) -> (R, R) {
        let n = R::from_f64(x.len() as f64);
        let mean = if self.center {
            sum(x, |x| x) / n
        } else {
            R::ZERO
        };
        let variance = sum(x, |x| (x - mean) * (x - mean)) / n;
        (mean, R::ONE / (variance + R::from_f64(self.eps)).sqrt())
    }

    /// Gradients of x, weight and bias, flat. The statistics are computed again: from rows in cache that is
    /// cheaper than keeping them.
    fn backward<T: Element>(&self, x: &[T], weight: &[T], grad: &[T]) -> [Vec<T>; 3] {
        let cols = weight.len();
        let mut weight_buffer = Vec::new();
        let weight = T::load(weight, &mut weight_buffer);
        let mut dx = vec![T::ZERO; x.len()];
        let len = block_rows(x.len() / cols.max(1), cols) * cols;
        let partials = par_blocks(&mut dx, len, |start, dx| {
            let (mut x_buffer, mut grad_buffer) = (Vec::new(), Vec::new());
            let x = T::load(&x[start..start + dx.len()], &mut x_buffer);
            let grad = T::load(&grad[start..start + dx.len()], &mut grad_buffer);
            let (mut dw, mut db) = (vec![T::Real::ZERO; cols], vec![T::Real::ZERO; cols]);
            T::store(dx, |dx| {
                simd(
                    #[inline(always)]
                    || {
                        let rows = x.chunks_exact(cols).zip(grad.chunks_exact(cols));
                        for ((x, grad), dx) in rows.zip(dx.chunks_exact_mut(cols)) {
                            self.backward_row(x, weight, grad, dx, &mut dw, &mut db);
                        }
                    },
                );
            });
            (dw, db)
        });
        let (mut dw, mut db) = (vec![T::Real::ZERO; cols], vec![T::Real::ZERO; cols]);
        for (dw_part, db_part) in &partials {
            add(&mut dw, dw_part);
            add(&mut db, db_part);
        }
        [dx, round(&dw), round(&db)]
    }

    /// With n = (x - mean) / std and g = grad * weight:
    /// dx = (g - mean(g) - n * mean(g * n)) / std, where RMSNorm has no mean(g).
    #[inline(always)]
    fn backward_row<R: Real>(
        &self,
        x: &[R],
        weight: &[R],
        grad: &[R],
        dx: &mut [R],
        dw: &mut [R],
        db: &mut [R],
    ) {
        let (mean, inv_std) = self.statistics(x);
        let sums = dw.iter_mut().zip(db);
        for ((((dx, &x), &weight), &grad), (dw, db)) in
            dx.iter_mut().zip(x).zip(weight).zip(grad).zip(sums)
        {
            let n = (x - mean) * inv_std;
            *dw += grad * n;
            *db += grad;
            *dx = grad * weight;
        }
        let count = R::from_f64(x.len() as f64);
        let mean_g = if self.center {
            sum(dx, |g| g) / count
        } else {
            R::ZERO
        };
        let mean_gn = sum2(dx, x, |g, x| g * (x - mean)) * inv_std / count;
        for (dx, &x) in dx.iter_mut().zip(x) {
            let n = (x - mean) * inv_std;
            *dx = (*dx - mean_g - n * mean_gn) * inv_std;
        }
    }

    fn gradients(&self, x: &Tensor, weight: &Tensor, grad: &Tensor) -> Result<[Tensor; 3]> {
        for_dtype!(self.op, x.dtype(), T => {
            with_slices([x, weight, grad], |[x_values, weight_values, grad]: [&[T]; 3]| {
                let [dx, dw, db] = self.backward(x_values, weight_values, grad);
                [tensor(dx, x.shape()), tensor(dw, weight.shape()), tensor(db, weight.shape())]
            })
        })
    }
}

fn add<R: Real>(total: &mut [R], part: &[R]) {
    for (total, &part) in total.iter_mut().zip(part) {
        *total += part;
    }
}

fn round<T: Element>(values: &[T::Real]) -> Vec<T> {
    let mut rounded = vec![T::ZERO; values.len()];
    T::store(&mut rounded, |out| out.copy_from_slice(values));
    rounded
}

fn tracked(arg: &Tensor, grad: Tensor) -> Option<Tensor> {
    arg.track_op().then_some(grad)
}

impl CustomOp2 for Norm {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        for_dtype!(self.op, x.dtype(), T => {
            let y = self.forward::<T>(slice(x, x_layout)?, slice(weight, weight_layout)?, None);
            Ok((WithDType::to_cpu_storage_owned(y), x_layout.shape().clone()))
        })
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _res: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [dx, dw, _] = self.gradients(x, weight, grad)?;
        Ok((tracked(x, dx), tracked(weight, dw)))
    }
}

impl CustomOp3 for Norm {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        for_dtype!(self.op, x.dtype(), T => {
            let bias = slice(bias, bias_layout)?;
            let y = self.forward::<T>(slice(x, x_layout)?, slice(weight, weight_layout)?, Some(bias));
            Ok((WithDType::to_cpu_storage_owned(y), x_layout.shape().clone()))
        })
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _res: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dx, dw, db] = self.gradients(x, weight, grad)?;
        Ok((tracked(x, dx), tracked(weight, dw), tracked(bias, db)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::test_support::{DTYPES, assert_same_as_composed, wave};

    #[test]
    fn fused_equals_composed() -> Result<()> {
        for dtype in DTYPES {
            // More than one block of rows, and a row length that fills no vector.
            let args = [wave(&[3, 97, 101], 1)?, wave(&[101], 2)?, wave(&[101], 3)?];
            for center in [true, false] {
                let norm = Norm {
                    op: "norm",
                    center,
                    eps: 1e-5,
                };
                let (op, composed) = (norm, norm);
                assert_same_as_composed(
                    dtype,
                    &args,
                    |a| op.apply(&a[0], &a[1], Some(&a[2])),
                    |a| composed.composed(&a[0], &a[1], Some(&a[2])),
                )?;
                assert_same_as_composed(
                    dtype,
                    &args[..2],
                    |a| op.apply(&a[0], &a[1], None),
                    |a| composed.composed(&a[0], &a[1], None),
                )?;
            }
        }
        Ok(())
    }
}
