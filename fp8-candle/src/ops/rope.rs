//! Rotary position embedding.

use super::fused;
use crate::base::check::{check_float, check_like};
use crate::base::data::storage::tensor_of;
use crate::base::error::{Result, shape_error};
use crate::base::math::Real;
use crate::base::profile::{Kind, enter};
use crate::base::simd::simd;
use crate::device::cpu::elements::{
    Buffer, Element, compute_dtype, for_dtype, map_rows, storage, tensor, with_slices,
};
#[cfg(feature = "cuda")]
use crate::device::cuda::ops::rope as cuda;
use crate::graph::{Ready, attach};
use candle_core::{D, Storage, Tensor};

/// Rotary position embedding, half-split: rotates the pair `(x[j], x[j + d/2])` by the angle of its position.
///
/// ```text
/// y[j]       = x[j] * cos[t, j] - x[j + d/2] * sin[t, j]
/// y[j + d/2] = x[j] * sin[t, j] + x[j + d/2] * cos[t, j]
/// ```
///
/// # Shapes
/// `x` `[b, h, t, d]` with even `d`, `cos` and `sin` `[t, d/2]` (more rows are ignored), result `[b, h, t, d]`.
/// All have one dtype. `cos` and `sin` receive gradients if they are part of the graph.
///
/// # Errors
/// If a shape is not one of these, if `x` is not f32, bf16, f16 or f64, or if `cos` or `sin` differ from it in dtype or
/// device.
///
/// # Source
/// Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864, in the layout
/// of GPT-NeoX and Llama.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
/// use fp8_candle::ops::rope;
///
/// // Two positions; the second one rotates by a quarter turn.
/// let cos = Tensor::new(&[[1f32], [0.0]], &Device::Cpu)?;
/// let sin = Tensor::new(&[[0f32], [1.0]], &Device::Cpu)?;
/// let x = Tensor::new(&[[[[1f32, 2.0], [1.0, 2.0]]]], &Device::Cpu)?;
/// let y = rope(&x, &cos, &sin)?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [1.0, 2.0, -2.0, 1.0]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    Rope::new(false).apply(x, cos, sin)
}

/// Rotary position embedding, interleaved: as [`rope`], on the pairs `(x[2j], x[2j + 1])`.
///
/// # Shapes
/// As [`rope`].
///
/// # Errors
/// As [`rope`].
///
/// # Source
/// Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864, section 3.4.2.
pub fn rope_i(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    Rope::new(true).apply(x, cos, sin)
}

#[derive(Debug, Clone, Copy)]
struct Rope {
    op: &'static str,
    interleaved: bool,
    /// Neighbouring rows of one position: the heads of a token, where tokens come before heads.
    heads_inside: usize,
}

/// `x` `[b, t, h, d]` rotated, or with `back` its gradient from the gradient of the result, outside any graph.
pub(crate) fn tokens_first(
    x: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    interleaved: bool,
    back: bool,
) -> Result<Tensor> {
    let _scope = enter(Kind::Attention);
    let rope = Rope::new(interleaved);
    let op = rope.op;
    let (t, heads) = match *x.dims() {
        [_, t, heads, _] => (t, heads),
        _ => {
            return Err(shape_error(
                op,
                "x",
                "[batch, time, heads, even size]",
                x.dims(),
            ));
        }
    };
    let sin = if back { sin.neg()? } else { sin.clone() };
    if !x.device().is_cpu() {
        let x = x.transpose(1, 2)?.contiguous()?;
        return Ok(rope.apply(&x, cos, &sin)?.transpose(1, 2)?.contiguous()?);
    }
    rope.check(x, t, cos, &sin)?;
    crate::base::simd::check()?;
    let rope = Rope {
        heads_inside: heads,
        ..rope
    };
    let (cos, sin) = (cos.narrow(0, 0, t)?, sin.narrow(0, 0, t)?);
    for_dtype!(op, x.dtype(), T => {
        with_slices([x, &cos, &sin], |[values, cos, sin]: [&[T]; 3]| {
            let turned = rope.rotate(values, cos, sin, t, x.dims(), false)?;
            tensor(turned, x.shape())
        })?
    })
}

impl Rope {
    fn new(interleaved: bool) -> Self {
        Self {
            op: if interleaved { "rope_i" } else { "rope" },
            interleaved,
            heads_inside: 1,
        }
    }

    /// Checks the angles of `t` positions.
    fn check(self, x: &Tensor, t: usize, cos: &Tensor, sin: &Tensor) -> Result<()> {
        check_float(self.op, "x", x)?;
        let half = match x.dims().last() {
            Some(d) if d % 2 == 0 => d / 2,
            _ => {
                return Err(shape_error(
                    self.op,
                    "x",
                    "an even last dimension",
                    x.dims(),
                ));
            }
        };
        for (what, angles) in [("cos", cos), ("sin", sin)] {
            check_like(self.op, what, angles, x)?;
            if !matches!(*angles.dims(), [rows, cols] if rows >= t && cols == half) {
                let expected = format!("[{t}, {half}] (or more rows)");
                return Err(shape_error(self.op, what, expected, angles.dims()));
            }
        }
        Ok(())
    }

    fn apply(self, x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
        let t = match *x.dims() {
            [_, _, t, d] if d % 2 == 0 => t,
            _ => {
                return Err(shape_error(
                    self.op,
                    "x",
                    "[batch, heads, time, even size]",
                    x.dims(),
                ));
            }
        };
        self.check(x, t, cos, sin)?;
        let (cos, sin) = (cos.narrow(0, 0, t)?, sin.narrow(0, 0, t)?);
        if !fused(x) {
            return self.composed(x, &cos, &sin);
        }
        let (x, cos, sin) = (x.contiguous()?, cos.contiguous()?, sin.contiguous()?);
        let result = Ready::new(self.turned(&x, &cos, &sin, false)?, x.shape())?;
        let args = [&x, &cos, &sin];
        attach(self.op, args, result, move |[x, cos, sin], _, grad| {
            let _scope = enter(Kind::Attention);
            let grad = &grad.contiguous()?;
            let dx = match x.track_op() {
                true => Some(tensor_of(self.turned(grad, cos, sin, true)?, x.shape())?),
                false => None,
            };
            let [d_cos, d_sin] = self.angle_gradients(x, cos, sin, grad)?;
            Ok([dx, d_cos, d_sin])
        })
    }

    /// Contiguous `x` `[b, h, t, d]` rotated by kernels, or rotated back.
    fn turned(self, x: &Tensor, cos: &Tensor, sin: &Tensor, back: bool) -> Result<Storage> {
        let _scope = enter(Kind::Attention);
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            return Ok(cuda::rotate(x, cos, sin, self.interleaved, back)?.into_storage());
        }
        crate::base::simd::check()?;
        for_dtype!(self.op, x.dtype(), T => {
            with_slices([x, cos, sin], |[values, cos, sin]: [&[T]; 3]| {
                self.rotate(values, cos, sin, x.dim(2)?, x.dims(), back).map(storage)
            })?
        })
    }

    fn composed(self, x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
        let compute = compute_dtype(x.dtype());
        let (cos, sin) = (cos.to_dtype(compute)?, sin.to_dtype(compute)?);
        let (x0, x1) = self.pairs(&x.contiguous()?.to_dtype(compute)?)?;
        let y0 = (x0.broadcast_mul(&cos)? - x1.broadcast_mul(&sin)?)?;
        let y1 = (x0.broadcast_mul(&sin)? + x1.broadcast_mul(&cos)?)?;
        let y = if self.interleaved {
            Tensor::stack(&[y0, y1], D::Minus1)?.reshape(x.shape())?
        } else {
            Tensor::cat(&[y0, y1], D::Minus1)?
        };
        Ok(y.to_dtype(x.dtype())?)
    }

    /// First and second members of the pairs, each `[b, h, t, d/2]`.
    fn pairs(self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let (b, h, t, d) = x.dims4()?;
        if self.interleaved {
            let x = x.reshape((b, h, t, d / 2, 2))?;
            Ok((
                x.narrow(4, 0, 1)?.squeeze(4)?,
                x.narrow(4, 1, 1)?.squeeze(4)?,
            ))
        } else {
            Ok((x.narrow(3, 0, d / 2)?, x.narrow(3, d / 2, d / 2)?))
        }
    }

    /// Rotates forward, or back for the gradient, since the transpose of a rotation is its inverse.
    fn rotate<T: Element>(
        &self,
        x: &[T],
        cos: &[T],
        sin: &[T],
        t: usize,
        dims: &[usize],
        back: bool,
    ) -> Result<Vec<T>> {
        let d = dims.last().copied().unwrap_or(1);
        let (mut cos_buffer, mut sin_buffer) = (Buffer::default(), Buffer::default());
        let (cos, sin) = (T::load(cos, &mut cos_buffer), T::load(sin, &mut sin_buffer));
        let sign = if back { -T::Real::ONE } else { T::Real::ONE };
        let half = d / 2;
        Ok(map_rows([x], d, |first_row, [x], y| {
            simd(
                #[inline(always)]
                || {
                    for (row, (x, y)) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)).enumerate() {
                        let start = (first_row + row) / self.heads_inside % t * half;
                        let (cos, sin) = (&cos[start..start + half], &sin[start..start + half]);
                        if self.interleaved {
                            rotate_interleaved(x, cos, sin, sign, y);
                        } else {
                            rotate_halves(x, cos, sin, sign, y);
                        }
                    }
                },
            );
        }))
    }

    /// Gradients of cos and sin, if they are part of a graph: sums over batch and heads. They use candle's primitives, since
    /// tables of angles are constants in nearly all models.
    fn angle_gradients(
        self,
        x: &Tensor,
        cos: &Tensor,
        sin: &Tensor,
        grad: &Tensor,
    ) -> Result<[Option<Tensor>; 2]> {
        if !cos.track_op() && !sin.track_op() {
            return Ok([None, None]);
        }
        let (dtype, compute) = (x.dtype(), compute_dtype(x.dtype()));
        let (x0, x1) = self.pairs(&x.detach().to_dtype(compute)?)?;
        let (g0, g1) = self.pairs(&grad.to_dtype(compute)?.contiguous()?)?;
        let d_cos = ((&g0 * &x0)? + (&g1 * &x1)?)?.sum((0, 1))?;
        let d_sin = ((&g1 * &x0)? - (&g0 * &x1)?)?.sum((0, 1))?;
        let tracked = |angles: &Tensor, gradient: Tensor| {
            let convert = || gradient.to_dtype(dtype);
            angles.track_op().then(convert).transpose()
        };
        Ok([tracked(cos, d_cos)?, tracked(sin, d_sin)?])
    }
}

#[inline(always)]
fn rotate_halves<R: Real>(x: &[R], cos: &[R], sin: &[R], sign: R, y: &mut [R]) {
    let (x0, x1) = x.split_at(cos.len());
    let (y0, y1) = y.split_at_mut(cos.len());
    let pairs = y0.iter_mut().zip(y1).zip(x0.iter().zip(x1));
    for (((y0, y1), (&x0, &x1)), (&cos, &sin)) in pairs.zip(cos.iter().zip(sin)) {
        let sin = sin * sign;
        *y0 = x0 * cos - x1 * sin;
        *y1 = x0 * sin + x1 * cos;
    }
}

#[inline(always)]
fn rotate_interleaved<R: Real>(x: &[R], cos: &[R], sin: &[R], sign: R, y: &mut [R]) {
    let (x, _) = x.as_chunks::<2>();
    let (y, _) = y.as_chunks_mut::<2>();
    for ((y, &[x0, x1]), (&cos, &sin)) in y.iter_mut().zip(x).zip(cos.iter().zip(sin)) {
        let sin = sin * sign;
        *y = [x0 * cos - x1 * sin, x0 * sin + x1 * cos];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::test_support::{DTYPES, assert_same_as_composed, wave};
    use fp8_test_support::models::{self, Model};

    #[test]
    fn fused_equals_composed() -> Result<()> {
        for dtype in DTYPES {
            let args = [
                wave(&[2, 3, 65, 38], 1),
                wave(&[65, 19], 2),
                wave(&[65, 19], 3),
            ];
            for interleaved in [false, true] {
                let op = Rope::new(interleaved);
                let model = Model::Rope(models::Rope {
                    d: 38,
                    t: 65,
                    interleaved,
                });
                assert_same_as_composed(
                    dtype,
                    &args,
                    &model,
                    |a| op.apply(&a[0], &a[1], &a[2]),
                    |a| op.composed(&a[0], &a[1], &a[2]),
                )?;
            }
        }
        Ok(())
    }
}
