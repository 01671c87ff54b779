//! GELU, tanh approximation.

#[cfg(feature = "cuda")]
use super::Activation;
use super::data::{compute_dtype, for_dtype, map_rows, storage, tensor, with_slices};
use super::math::Real;
use super::node::{Fused, apply1};
use super::{check_float, fused};
#[cfg(feature = "cuda")]
use crate::device::cuda::ops::activation as cuda;
use crate::error::Result;
use crate::profile::Kind;
use crate::simd::simd;
use candle_core::{Storage, Tensor};

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
    check_float("gelu", "x", x)?;
    if !fused(x) {
        return composed(x);
    }
    apply1(Gelu, x)
}

/// Not [`Tensor::gelu`], whose gradient has constants with seven digits.
pub(super) fn composed(x: &Tensor) -> Result<Tensor> {
    let dtype = x.dtype();
    let x = x.contiguous()?.to_dtype(compute_dtype(dtype))?;
    let u = ((x.sqr()? * CUBIC)? + 1.0)?
        .mul(&x)?
        .affine(SQRT_2_OVER_PI, 0.0)?;
    Ok((x * u.tanh()?.affine(0.5, 0.5)?)?.to_dtype(dtype)?)
}

struct Gelu;

impl Fused<1> for Gelu {
    fn name(&self) -> &'static str {
        "gelu"
    }

    fn kind(&self) -> Kind {
        Kind::Activation
    }

    fn cpu_forward(&self, [x]: [&Tensor; 1]) -> Result<Storage> {
        for_dtype!("gelu", x.dtype(), T => {
            with_slices([x], |x: [&[T]; 1]| storage(map_rows(x, 1, |_, [x], y| forward(x, y))))
        })
    }

    fn cpu_backward(
        &self,
        [x]: [&Tensor; 1],
        _res: &Tensor,
        grad: &Tensor,
    ) -> Result<[Option<Tensor>; 1]> {
        if !x.track_op() {
            return Ok([None]);
        }
        for_dtype!("gelu", x.dtype(), T => {
            with_slices([x, grad], |[x_values, grad]: [&[T]; 2]| {
                let dx = map_rows([x_values, grad], 1, |_, [x, g], dx| backward(x, g, dx));
                Ok([Some(tensor(dx, x.shape())?)])
            })?
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_forward(&mut self, [x]: [&Tensor; 1]) -> Result<Storage> {
        cuda::forward(Activation::Gelu, x)
    }

    #[cfg(feature = "cuda")]
    fn cuda_backward(
        &self,
        [x]: [&Tensor; 1],
        _res: &Tensor,
        grad: &Tensor,
    ) -> Result<[Option<Tensor>; 1]> {
        Ok([x
            .track_op()
            .then(|| cuda::backward(Activation::Gelu, x, grad))
            .transpose()?])
    }
}

const SQRT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;
const CUBIC: f64 = 0.044_715;

fn forward<R: Real>(x: &[R], y: &mut [R]) {
    simd(
        #[inline(always)]
        || {
            for (y, &x) in y.iter_mut().zip(x) {
                *y = value(x);
            }
        },
    );
}

fn backward<R: Real>(x: &[R], grad: &[R], dx: &mut [R]) {
    simd(
        #[inline(always)]
        || {
            for ((dx, &x), &grad) in dx.iter_mut().zip(x).zip(grad) {
                *dx = grad * slope(x);
            }
        },
    );
}

#[inline(always)]
pub(super) fn value<R: Real>(x: R) -> R {
    let (sigmoid, _) = sigmoid_of_2u(x);
    x * sigmoid
}

/// The derivative.
#[inline(always)]
pub(super) fn slope<R: Real>(x: R) -> R {
    let (linear, cubic) = (
        R::from_f64(2.0 * SQRT_2_OVER_PI),
        R::from_f64(6.0 * SQRT_2_OVER_PI * CUBIC),
    );
    let limit = R::from_f64(32.0);
    // The derivative reaches 0 and 1 well within the limits; beyond them it would be Inf * 0.
    let x = if x > limit { limit } else { x };
    let x = if x < -limit { -limit } else { x };
    let (sigmoid, slope) = sigmoid_of_2u(x);
    let du = (x * x).mul_add(cubic, linear) * x; // x * d(2u)/dx
    slope.mul_add(du, sigmoid)
}

/// sigmoid(2u) and its derivative with respect to 2u, with an exponential that cannot overflow.
#[inline(always)]
fn sigmoid_of_2u<R: Real>(x: R) -> (R, R) {
    let (linear, cubic) = (
        R::from_f64(2.0 * SQRT_2_OVER_PI),
        R::from_f64(2.0 * SQRT_2_OVER_PI * CUBIC),
    );
    let v = (x * x).mul_add(cubic, linear) * x;
    let e = (-v.abs()).exp();
    let d = R::ONE / (R::ONE + e);
    (if v < R::ZERO { e * d } else { d }, e * d * d)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::test_support::{DTYPES, assert_same_as_composed, wave};
    use candle_core::{Device, Var};

    #[test]
    fn fused_equals_composed() -> Result<()> {
        for dtype in DTYPES {
            let x = (wave(&[7, 33], 1)? * 3.0)?;
            assert_same_as_composed(dtype, &[x], |a| gelu(&a[0]), |a| composed(&a[0]))?;
        }
        Ok(())
    }

    #[test]
    fn extreme_inputs() -> Result<()> {
        let x = Var::new(
            &[-3e38f32, -40.0, -0.0, 40.0, 3e38, f32::INFINITY],
            &Device::Cpu,
        )?;
        let y = gelu(&x)?;
        assert_eq!(
            y.to_vec1::<f32>()?,
            [0.0, 0.0, 0.0, 40.0, 3e38, f32::INFINITY]
        );
        let grads = y.sum_all()?.backward()?;
        let dx = grads.get(&x).map(|dx| dx.to_vec1::<f32>()).transpose()?;
        assert_eq!(dx, Some(vec![0.0, 0.0, 0.5, 1.0, 1.0, 1.0]));
        Ok(())
    }
}
