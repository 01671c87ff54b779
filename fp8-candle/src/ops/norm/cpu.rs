//! LayerNorm and RMSNorm on the CPU, over blocks of rows.

use super::Norm;
use crate::base::math::{Real, sum, sum2};
use crate::base::simd::simd;
use crate::device::cpu::elements::{Buffer, Element, block_rows, map_rows, piece_len};
use crate::device::filled_in_pieces;

impl Norm {
    pub(super) fn cpu_forward<T: Element>(
        &self,
        x: &[T],
        weight: &[T::Real],
        bias: Option<&[T::Real]>,
    ) -> Vec<T> {
        let cols = weight.len();
        map_rows([x], cols, |_, [x], y| self.forward_rows(x, weight, bias, y))
    }

    /// The results from element `start`, the first of a row, on.
    pub(super) fn rows<T: Element>(
        &self,
        x: &[T],
        weight: &[T::Real],
        bias: Option<&[T::Real]>,
        start: usize,
        y: &mut [T],
    ) {
        let mut buffer = Buffer::default();
        let x = T::load(&x[start..start + y.len()], &mut buffer);
        T::store(y, |y| self.forward_rows(x, weight, bias, y));
    }

    fn forward_rows<R: Real>(&self, x: &[R], weight: &[R], bias: Option<&[R]>, y: &mut [R]) {
        let cols = weight.len();
        simd(
            #[inline(always)]
            || {
                for (x, y) in x.chunks_exact(cols).zip(y.chunks_exact_mut(cols)) {
                    self.forward_row(x, weight, bias, y);
                }
            },
        );
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

    /// Gradients of x and, times `sums_factor`, of weight and bias, flat. The statistics are recomputed: from rows in cache that is
    /// cheaper than keeping them.
    pub(super) fn cpu_backward<T: Element>(
        &self,
        x: &[T],
        weight: &[T::Real],
        grad: &[T],
        sums_factor: f64,
    ) -> (Vec<T>, [Vec<T::Real>; 2]) {
        let cols = weight.len();
        let len = block_rows(x.len() / cols.max(1), cols) * cols;
        let lens = [len, piece_len(cols)];
        let (dx, partials) = filled_in_pieces(T::default(), x.len(), lens, |pieces| {
            let (mut x_buffer, mut grad_buffer) = (Buffer::default(), Buffer::default());
            let (mut dw, mut db) = (vec![T::Real::ZERO; cols], vec![T::Real::ZERO; cols]);
            for (start, dx) in pieces {
                let x = T::load(&x[start..start + dx.len()], &mut x_buffer);
                let grad = T::load(&grad[start..start + dx.len()], &mut grad_buffer);
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
            }
            (dw, db)
        });
        let (mut dw, mut db) = (vec![T::Real::ZERO; cols], vec![T::Real::ZERO; cols]);
        for (dw_part, db_part) in &partials {
            add(&mut dw, dw_part);
            add(&mut db, db_part);
        }
        let factor = T::Real::from_f64(sums_factor);
        for sum in dw.iter_mut().chain(&mut db) {
            *sum *= factor;
        }
        (dx, [dw, db])
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
}

fn add<R: Real>(total: &mut [R], part: &[R]) {
    for (total, &part) in total.iter_mut().zip(part) {
        *total += part;
    }
}
