//! Kernels against definitions.

use super::*;
use crate::base::activation::Curve;
use crate::ops::test_support::{DTYPES, wave};
use candle_core::{DType, Var};

/// The kernels against candle's operations and their gradients.
#[test]
fn fused_equals_composed() -> Result<()> {
    for dtype in DTYPES {
        let tolerance = match dtype {
            DType::F64 => 1e-13,
            DType::F32 => 3e-6,
            DType::F16 => 2e-3,
            _ => 1.6e-2,
        };
        for activation in Activation::all() {
            let x = Var::from_tensor(&(wave(&[7, 34], 1) * 4.0)?.to_dtype(dtype)?)?;
            let y = activation.apply(&x.detach())?;
            let reference = activation.composed(&x)?;
            let grad = wave(y.dims(), 5).to_dtype(dtype)?;
            let grads = (&reference * &grad)?.sum_all()?.backward()?;
            let dx = activation.backward(&x.detach(), &grad)?;
            let wide = |x: &Tensor| x.detach().to_dtype(DType::F64)?.flatten_all();
            let far = |a: &Tensor, b: &Tensor| -> Result<f64> {
                let (a, b) = (wide(a)?, wide(b)?);
                Ok((a - b)?.abs()?.max(0)?.to_scalar()?)
            };
            let expected = grads
                .get(&x)
                .map_or_else(|| x.zeros_like(), |g| Ok(g.clone()))?;
            // Values up to 32, derivatives up to 16 times those of the arguments.
            assert!(
                far(&y, &reference)? <= 32. * tolerance,
                "{activation} {dtype:?}"
            );
            assert!(
                far(&dx, &expected)? <= 16. * tolerance,
                "{activation} {dtype:?}"
            );
        }
    }
    Ok(())
}

#[test]
fn names_and_odd_features() -> Result<()> {
    for activation in Activation::all() {
        assert_eq!(activation.to_string().parse(), Ok(activation));
    }
    let unknown = "tanh".parse::<Activation>().unwrap_err();
    assert_eq!(unknown.0, "tanh");
    let x = wave(&[2, 3], 1);
    let odd = Activation::SwiGlu.apply(&x).unwrap_err().to_string();
    assert!(odd.contains("an even number of features"), "{odd}");
    assert_eq!(Activation::Relu.apply(&x)?.dims(), [2, 3]);
    Ok(())
}

#[test]
fn extreme_inputs() -> Result<()> {
    let device = candle_core::Device::Cpu;
    let x = Tensor::new(&[-3e38f32, -100., 100., 3e38], &device)?;
    for activation in Activation::all().filter(|activation| !activation.is_gated()) {
        let one = x.ones_like()?;
        let dx = activation.backward(&x, &one)?.to_vec1::<f32>()?;
        assert!(dx.iter().all(|dx| !dx.is_nan()), "{activation}: {dx:?}");
        assert_eq!(dx[..2], [0., 0.], "{activation}");
    }
    Ok(())
}

/// Data at a power of two are the plain values divided by it, to the bit.
#[test]
fn a_scale_only_moves_the_exponent() -> Result<()> {
    let (data, grad) = (
        wave(&[7, 33], 1).to_dtype(DType::F32)?,
        wave(&[7, 33], 2).to_dtype(DType::F32)?,
    );
    for activation in Activation::all().filter(|activation| !activation.is_gated()) {
        for scale in [0.125, 1.0, 8.0] {
            let curve = activation.curve();
            let value = (&data * scale)?;
            let y = (scaled_curve("curve", curve, &data, scale)? * scale)?;
            let dx = scaled_slope("curve", curve, &data, scale, &grad)?;
            let flat = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
            assert_eq!(
                flat(&y)?,
                flat(&activation.apply(&value)?)?,
                "{activation} {scale}"
            );
            assert_eq!(
                flat(&dx)?,
                flat(&activation.backward(&value, &grad)?)?,
                "{activation} {scale}"
            );
        }
    }
    assert_eq!(Activation::Glu.curve(), Curve::Sigmoid);
    Ok(())
}
