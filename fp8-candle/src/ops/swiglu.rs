//! SwiGLU: the gated activation of Llama-like models.

#[cfg(feature = "cuda")]
use super::Activation;
use super::data::{Element, compute_dtype, for_dtype, map_rows, storage, tensor, with_slices};
use super::math::Real;
use super::node::{Fused, apply2};
use super::{check_float, check_like, fused, shape_error};
#[cfg(feature = "cuda")]
use crate::device::cuda::ops::activation as cuda;
use crate::error::Result;
use crate::profile::Kind;
use crate::simd::simd;
use candle_core::{Storage, Tensor};

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
    const OP: &str = "swiglu";
    check_float(OP, "gate", gate)?;
    check_like(OP, "up", up, gate)?;
    if gate.dims() != up.dims() {
        return Err(shape_error(
            OP,
            "up",
            format!("{:?}, as gate", gate.dims()),
            up,
        ));
    }
    if !fused(gate) {
        return composed(gate, up);
    }
    apply2(SwiGlu, gate, up)
}

fn composed(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let dtype = gate.dtype();
    let wide = |x: &Tensor| x.to_dtype(compute_dtype(dtype));
    Ok((wide(gate)?.silu()? * wide(up)?)?.to_dtype(dtype)?)
}

struct SwiGlu;

/// One gradient: from gate, up and the gradient of the result.
type Part<R> = fn(&[R], &[R], &[R], &mut [R]);

impl Fused<2> for SwiGlu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn kind(&self) -> Kind {
        Kind::Activation
    }

    fn cpu_forward(&self, [gate, up]: [&Tensor; 2]) -> Result<Storage> {
        for_dtype!("swiglu", gate.dtype(), T => {
            with_slices([gate, up], |slices: [&[T]; 2]| {
                storage(map_rows(slices, 1, |_, [gate, up], y| forward(gate, up, y)))
            })
        })
    }

    fn cpu_backward(
        &self,
        [gate, up]: [&Tensor; 2],
        _res: &Tensor,
        grad: &Tensor,
    ) -> Result<[Option<Tensor>; 2]> {
        for_dtype!("swiglu", gate.dtype(), T => {
            with_slices([gate, up, grad], |slices: [&[T]; 3]| {
                let of = |tracked: bool, part: Part<<T as Element>::Real>| -> Result<Option<Tensor>> {
                    if !tracked {
                        return Ok(None);
                    }
                    let values = map_rows(slices, 1, |_, [gate, up, grad], out| part(gate, up, grad, out));
                    Ok(Some(tensor(values, gate.shape())?))
                };
                Ok([of(gate.track_op(), grad_gate)?, of(up.track_op(), grad_up)?])
            })?
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_forward(&mut self, [gate, up]: [&Tensor; 2]) -> Result<Storage> {
        cuda::forward_pair(Activation::SwiGlu, gate, up)
    }

    #[cfg(feature = "cuda")]
    fn cuda_backward(
        &self,
        [gate, up]: [&Tensor; 2],
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<[Option<Tensor>; 2]> {
        let [dgate, dup] = cuda::backward_pair(Activation::SwiGlu, gate, up, grad)?;
        Ok([
            gate.track_op().then_some(dgate),
            up.track_op().then_some(dup),
        ])
    }
}

fn forward<R: Real>(gate: &[R], up: &[R], y: &mut [R]) {
    simd(
        #[inline(always)]
        || {
            for ((y, &gate), &up) in y.iter_mut().zip(gate).zip(up) {
                *y = gate * sigmoid(gate) * up;
            }
        },
    );
}

fn grad_gate<R: Real>(gate: &[R], up: &[R], grad: &[R], out: &mut [R]) {
    simd(
        #[inline(always)]
        || {
            for (((out, &gate), &up), &grad) in out.iter_mut().zip(gate).zip(up).zip(grad) {
                let s = sigmoid(gate);
                // 1 - s without cancellation.
                let rest = sigmoid(-gate);
                *out = grad * up * s * (gate * rest + R::ONE);
            }
        },
    );
}

fn grad_up<R: Real>(gate: &[R], _: &[R], grad: &[R], out: &mut [R]) {
    simd(
        #[inline(always)]
        || {
            for ((out, &gate), &grad) in out.iter_mut().zip(gate).zip(grad) {
                *out = grad * gate * sigmoid(gate);
            }
        },
    );
}

/// 1 / (1 + e^-x), with an exponential that cannot overflow.
#[inline(always)]
fn sigmoid<R: Real>(x: R) -> R {
    let e = (-x.abs()).exp();
    let d = R::ONE / (R::ONE + e);
    if x < R::ZERO { e * d } else { d }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::test_support::{DTYPES, assert_same_as_composed, wave};
    use candle_core::Device;

    #[test]
    fn fused_equals_composed() -> Result<()> {
        for dtype in DTYPES {
            let args = [(wave(&[7, 33], 1)? * 3.0)?, wave(&[7, 33], 2)?];
            assert_same_as_composed(
                dtype,
                &args,
                |a| swiglu(&a[0], &a[1]),
                |a| composed(&a[0], &a[1]),
            )?;
        }
        Ok(())
    }

    #[test]
    fn extreme_inputs_and_mismatches() -> Result<()> {
        let gate = Tensor::new(&[-3e38f32, -0.0, 3e38, f32::NAN], &Device::Cpu)?;
        let one = gate.ones_like()?;
        let y = swiglu(&gate, &one)?.to_vec1::<f32>()?;
        assert_eq!(y[..3], [0.0, 0.0, 3e38]);
        assert!(y[3].is_nan());
        let short = Tensor::new(&[1f32], &Device::Cpu)?;
        assert!(matches!(
            swiglu(&gate, &short),
            Err(crate::Error::Shape { op: "swiglu", .. })
        ));
        Ok(())
    }
}
