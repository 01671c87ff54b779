//! Compound operations on 16-bit data, at magnitudes beyond 16 bits, and on tensors of zero scale.

use crate::gradient_check::{values, wave};
use candle_core::{DType, Device, Tensor};
use fp8_candle::Error as Operand;
use fp8_candle::ops::AttentionOptions;
use fp8_scaled::{Error, Result};
use fp8_scaled::{Scaled, ScaledDType, ScaledVar, as_scaled};

type Function<'a> = &'a dyn Fn(&[Scaled]) -> Result<Scaled>;

/// Values and gradients of `f` in f16 and in f64, whose inputs are equal, within `tolerance` of the largest.
fn compare_f16_with_f64(
    name: &str,
    inputs: &[(&[usize], f32)],
    tolerance: f64,
    f: Function<'_>,
) -> Result<()> {
    let run = |dtype: DType| -> Result<Vec<(f32, Vec<f64>)>> {
        let vars = inputs
            .iter()
            .enumerate()
            .map(|(i, &(dims, scale))| {
                let data = wave(dims, i).to_dtype(DType::F16)?.to_dtype(dtype)?;
                ScaledVar::from_scaled(format!("{i}"), &Scaled::from_parts(&data, scale)?)
            })
            .collect::<Result<Vec<_>>>()?;
        let args: Vec<Scaled> = vars.iter().map(ScaledVar::value).collect();
        let y = f(&args)?;
        let g = Scaled::from_parts(&wave(y.dims(), 9).to_dtype(DType::F16)?, 0.5)?;
        let ScaledDType::Float(result) = y.dtype() else {
            panic!("{name}: a result in FP8")
        };
        let grads = y.backward_with(&g.astype(result)?)?;
        let mut out = vec![(y.scale().to_f32(), values(&y)?)];
        for var in &vars {
            let grad = grads.get(var).unwrap();
            assert_eq!(grad.dtype(), ScaledDType::Float(dtype), "{name}");
            out.push((grad.scale().to_f32(), values(grad)?));
        }
        Ok(out)
    };
    let pairs = run(DType::F16)?.into_iter().zip(run(DType::F64)?);
    for (i, ((scale, got), (expected_scale, expected))) in pairs.enumerate() {
        assert_eq!(scale, expected_scale, "{name}, result {i}");
        let largest = expected.iter().fold(0f64, |a, b| a.max(b.abs()));
        assert!(largest > 0.0, "{name}, result {i}: zeros");
        for (got, expected) in got.iter().zip(&expected) {
            let error = (got - expected).abs();
            assert!(
                error <= tolerance * largest,
                "{name}, result {i}: {got}, expected {expected}, largest {largest}"
            );
        }
    }
    Ok(())
}

/// Two roundings of f16.
const ROUNDED: f64 = 1e-3;

#[test]
fn f16_has_the_values_of_f64() -> Result<()> {
    let one: &[(&[usize], f32)] = &[(&[4, 6], 2.0)];
    compare_f16_with_f64("softmax", one, ROUNDED, &|x| x[0].softmax(1))?;
    compare_f16_with_f64("softmax over rows", one, ROUNDED, &|x| x[0].softmax(0))?;
    compare_f16_with_f64("log_softmax", one, ROUNDED, &|x| x[0].log_softmax(1))?;
    compare_f16_with_f64("causal_softmax", one, ROUNDED, &|x| {
        x[0].causal_softmax(0.1)
    })?;
    compare_f16_with_f64("gelu", one, ROUNDED, &|x| x[0].gelu())?;
    compare_f16_with_f64("silu", one, ROUNDED, &|x| x[0].silu())?;
    compare_f16_with_f64("dropout", one, ROUNDED, &|x| x[0].dropout(0.3, 1))?;
    let ids = Tensor::new(&[3u32, 0, 3, 1, 3], &Device::Cpu)?;
    compare_f16_with_f64("embedding", &[(&[4, 6], 2.0)], ROUNDED, &|x| {
        // Rows that are not selected get a gradient of zero.
        x[0].embedding(&ids)
    })?;
    let targets = Tensor::new(&[3u32, 0, 5, 1], &Device::Cpu)?;
    compare_f16_with_f64("cross_entropy", one, ROUNDED, &|x| {
        x[0].cross_entropy(&targets)
    })?;
    let images: &[(&[usize], f32)] = &[(&[2, 3, 7, 6], 4.0), (&[4, 3, 3, 2], 0.5)];
    compare_f16_with_f64("conv2d", images, ROUNDED, &|x| {
        x[0].conv2d(&x[1], 1, 2, 1, 1)
    })?;
    compare_f16_with_f64("max_pool2d", &images[..1], ROUNDED, &|x| x[0].max_pool2d(3))?;
    compare_f16_with_f64("avg_pool2d", &images[..1], ROUNDED, &|x| x[0].avg_pool2d(3))
}

#[test]
fn scale_free_operations_work_at_any_magnitude() -> Result<()> {
    // Far outside of the range of f16, whose largest number is 2^16.
    for exponent in [-60, 0, 60] {
        let scale = 2f32.powi(exponent);
        compare_f16_with_f64(
            "layer_norm",
            &[(&[5, 16], scale), (&[16], 2.0), (&[16], 0.25)],
            ROUNDED,
            &|x| x[0].layer_norm(&x[1], Some(&x[2]), 0.0),
        )?;
        compare_f16_with_f64(
            "rms_norm",
            &[(&[5, 16], scale), (&[16], 2.0)],
            ROUNDED,
            &|x| x[0].rms_norm(&x[1], 0.0),
        )?;
        // The magnitudes of queries and keys cancel; values have any.
        let inputs: &[(&[usize], f32)] = &[
            (&[1, 2, 4, 8], scale),
            (&[1, 2, 4, 8], 1.0 / scale),
            (&[1, 2, 4, 8], scale),
        ];
        compare_f16_with_f64("attention", inputs, ROUNDED, &|x| {
            Scaled::attention(&x[0], &x[1], &x[2], AttentionOptions::default())
        })?;
        let linear: &[(&[usize], f32)] = &[(&[5, 64], scale), (&[3, 64], 0.5), (&[3], scale)];
        compare_f16_with_f64("linear", linear, ROUNDED, &|x| {
            x[0].linear(&x[1], Some(&x[2]))
        })?;
    }
    Ok(())
}

#[test]
fn attention_that_is_nearly_uniform_keeps_its_gradients() -> Result<()> {
    // Scores near 2^-40: gradients of queries and keys are as small, and their scales hold that.
    let small = 2f32.powi(-20);
    let inputs: &[(&[usize], f32)] = &[
        (&[1, 1, 4, 8], small),
        (&[1, 1, 4, 8], small),
        (&[1, 1, 4, 8], 1.0),
    ];
    compare_f16_with_f64("attention", inputs, ROUNDED, &|x| {
        Scaled::attention(&x[0], &x[1], &x[2], AttentionOptions::default())
    })
}

#[test]
fn attention_of_large_data_keeps_its_gradients() -> Result<()> {
    // Data up to 2^12 at a small scale. Products of three of them, summed, are far beyond f16.
    let input: (&[usize], f32) = (&[1, 2, 16, 32], 1.0);
    compare_f16_with_f64("attention", &[input; 3], ROUNDED, &|x| {
        let large = |i: usize| x[i].rebalance(2f32.powi(-12));
        let options = AttentionOptions::default().with_causal(true);
        Scaled::attention(&large(0)?, &large(1)?, &large(2)?, options)
    })
}

#[test]
fn tensors_of_zero_scale_are_zeros() -> Result<()> {
    let zeros = |dims: &[usize]| Scaled::zeros(dims, DType::F16, &Device::Cpu);
    let ones = |dims: &[usize]| as_scaled(&Tensor::ones(dims, DType::F16, &Device::Cpu)?, None);
    let all = |x: Scaled, expected: f64| -> Result<()> {
        assert!(
            values(&x)?.iter().all(|&x| (x - expected).abs() < 1e-3),
            "{x:?}"
        );
        Ok(())
    };
    let x = zeros(&[3, 4])?;
    all(x.softmax(1)?, 0.25)?;
    all(x.log_softmax(1)?, 0.25f64.ln())?;
    all(x.gelu()?, 0.0)?;
    all(x.silu()?, 0.0)?;
    all(x.dropout(0.5, 1)?, 0.0)?;
    for eps in [0.0, 1e-5] {
        all(x.layer_norm(&ones(&[4])?, Some(&ones(&[4])?), eps)?, 1.0)?;
        all(x.rms_norm(&ones(&[4])?, eps)?, 0.0)?;
        all(ones(&[3, 4])?.rms_norm(&zeros(&[4])?, eps)?, 0.0)?;
    }
    all(x.linear(&ones(&[2, 4])?, Some(&ones(&[2])?))?, 1.0)?;
    let targets = Tensor::new(&[0u32, 1, 3], &Device::Cpu)?;
    all(x.cross_entropy(&targets)?, 4f64.ln())?;
    let (q, options) = (zeros(&[1, 1, 3, 4])?, AttentionOptions::default());
    let v = ones(&[1, 1, 3, 4])?;
    all(Scaled::attention(&q, &v, &v, options.clone())?, 1.0)?;
    all(Scaled::attention(&v, &v, &q, options)?, 0.0)
}

#[test]
fn gradients_through_zero_scales_are_finite() -> Result<()> {
    let gain = ScaledVar::new("gain", &Tensor::ones(4, DType::F16, &Device::Cpu)?)?;
    let zeros = Scaled::zeros((3, 4), DType::F16, &Device::Cpu)?;
    let x = ScaledVar::from_scaled("x", &zeros)?;
    for y in [
        x.value().rms_norm(&gain.value(), 1e-5)?,
        x.value().mul(&gain.value())?.softmax(1)?,
        x.value().gelu()?.mul(&gain.value())?,
        x.value().linear(&gain.value().reshape(&[1, 4])?, None)?,
    ] {
        let grads = y.sum_all()?.backward()?;
        for var in [&x, &gain] {
            let grad = grads.get(var).unwrap();
            assert!(values(grad)?.iter().all(|g| g.is_finite()), "{grad:?}");
        }
    }
    Ok(())
}

#[test]
fn wrong_arguments_are_errors() -> Result<()> {
    let x = as_scaled(&wave(&[3, 4], 1), None)?;
    let image = x.reshape(&[1, 1, 3, 4])?;
    for (name, result) in [
        ("softmax", x.softmax(2)),
        ("log_softmax", x.log_softmax(2)),
        ("max_pool2d", x.max_pool2d(2)),
        ("max_pool2d", image.max_pool2d(0)),
        ("avg_pool2d", image.avg_pool2d(4)),
        ("conv2d", x.conv2d(&x, 0, 1, 1, 1)),
        ("linear", x.linear(&x.reshape(&[4, 3])?, None)),
        ("linear", x.linear(&x, Some(&x))),
        ("layer_norm", x.layer_norm(&x, None, 0.0)),
    ] {
        let error = result.expect_err(name);
        assert!(
            matches!(&error, Error::Fp8(Operand::Shape { op, .. }) if *op == name),
            "{name}: {error:?}"
        );
    }
    for p in [-0.5, f64::NAN] {
        let error = x.dropout(p, 0).expect_err("no probability");
        let is_named = matches!(error, Error::Fp8(Operand::Probability { .. }));
        assert!(is_named, "{p}: {error:?}");
    }
    let ids = Tensor::new(&[7u32], &Device::Cpu)?;
    let error = x.embedding(&ids).expect_err("no row 7").to_string();
    assert!(error.contains("index 7"), "{error}");
    assert_eq!(x.embedding(&ids.zeros_like()?)?.dims(), [1, 4]);
    let classes = Tensor::new(&[0u32, 1, 4], &Device::Cpu)?;
    let error = x.cross_entropy(&classes).expect_err("no class 4");
    assert!(
        matches!(
            error,
            Error::Fp8(Operand::Target {
                target: 4,
                position: 2,
                ..
            })
        ),
        "{error:?}"
    );
    Ok(())
}

/// NaN is the largest value of a window, wherever it is.
#[test]
fn pooling_keeps_nan() -> Result<()> {
    for place in 0..4 {
        let mut window = [1f32, 3.0, 0.0, 2.0];
        window[place] = f32::NAN;
        let window = Tensor::from_slice(&window, (1, 1, 2, 2), &candle_core::Device::Cpu)?;
        let largest = Scaled::from_parts(&window, 2.0)?.max_pool2d(2)?;
        assert!(values(&largest)?[0].is_nan(), "{place}");
    }
    Ok(())
}
