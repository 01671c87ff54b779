//! Values far from 1.

use candle_core::{DType, Device, Tensor};
use fp8_candle::Error as Operand;
use fp8_scaled::{Error, Result};
use fp8_scaled::{Scaled, ScaledVar};

#[test]
fn norms_of_values_far_below_eps_have_their_gradients() -> Result<()> {
    let x = Tensor::new(&[[1f32, -2.0, 0.5, 3.0]], &Device::Cpu)?;
    let gain = Scaled::from_parts(&Tensor::ones(4, DType::F32, &Device::Cpu)?, 1.0)?;
    let cotangent = Tensor::new(&[[1f32, 2.0, 4.0, -3.0]], &Device::Cpu)?;
    let cotangent = Scaled::from_parts(&cotangent, 1.0)?;
    for exponent in [-50, -100, -126] {
        let x = ScaledVar::from_scaled("x", &Scaled::from_parts(&x, 2f32.powi(exponent))?)?;
        // For such values a norm divides by the root of eps, and layer norm subtracts the mean of the cotangent, 1.
        for (y, mean) in [
            (x.value().rms_norm(&gain, 1e-4)?, 0.0),
            (x.value().layer_norm(&gain, None, 1e-4)?, 1.0),
        ] {
            let grads = y.backward_with(&cotangent)?;
            let grad = grads.get(&x).map(|grad| grad.flatten_all()?.to_vec1());
            let grad = grad.transpose()?.unwrap_or_default();
            for (grad, g) in grad.iter().zip([1.0, 2.0, 4.0, -3.0]) {
                let expected = 100.0 * (g - mean);
                assert!(
                    (grad - expected).abs() < 0.01,
                    "2^{exponent}: {grad} {expected}"
                );
            }
            assert_eq!(grad.len(), 4);
        }
    }
    Ok(())
}

#[test]
fn zeros_to_a_power_beyond_the_range_of_scales() -> Result<()> {
    let zeros = Tensor::zeros((1, 12), DType::F32, &Device::Cpu)?;
    let x = ScaledVar::from_scaled("x", &Scaled::from_parts(&zeros, 2f32.powi(100))?)?;
    for y in [x.value().powi(12)?, x.value().prod_keepdim(&[1])?] {
        let grads = y.sum_all()?.backward()?;
        assert!(y.flatten_all()?.to_vec1()?.iter().all(|&y| y == 0.0));
        let grad = grads.get(&x).map(|grad| grad.flatten_all()?.to_vec1());
        assert_eq!(grad.transpose()?, Some(vec![0.0; 12]));
    }
    Ok(())
}

#[test]
fn f64_values_beyond_f32() -> Result<()> {
    let x = Tensor::new(&[2f32.powi(100), 2f32.powi(-100)], &Device::Cpu)?;
    for exponent in [-100, 100] {
        let x = Scaled::from_parts(&x, 2f32.powi(exponent))?.to_tensor(DType::F64)?;
        let expected = [100, -100].map(|own| 2f64.powi(own + exponent));
        assert_eq!(x.to_vec1::<f64>()?, expected);
    }
    Ok(())
}

#[test]
fn shapes_beyond_all_memory_and_dimensions_named_twice_are_errors() -> Result<()> {
    let x = Scaled::zeros((2, 3), DType::F32, &Device::Cpu)?;
    let empty = Scaled::zeros((2, 0), DType::F32, &Device::Cpu)?;
    for (name, result) in [
        ("reshape", x.reshape(&[usize::MAX, 3])),
        ("reshape", empty.reshape(&[usize::MAX, 3, 0])),
        ("sum", x.sum_keepdim(&[0, 0])),
        ("mean", x.mean_keepdim(&[1, 0, 1])),
        ("prod", x.prod_keepdim(&[1, 1])),
    ] {
        let error = result.expect_err(name);
        assert!(
            matches!(&error, Error::Fp8(Operand::Shape { op, .. }) if *op == name),
            "{name}: {error:?}"
        );
    }
    Ok(())
}
