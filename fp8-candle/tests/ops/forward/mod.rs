//! Values of the differentiable building blocks: against candle-nn, in every dtype, and on bad input.

mod special;
mod targets;

use candle_core::{D, DType, Device, Tensor};
use fp8_candle::Result;
use fp8_candle::ops::{
    CrossEntropyOptions, causal_softmax, cross_entropy, cross_entropy_with, gelu, layer_norm,
    rms_norm, rope, rope_i, softmax_last_dim,
};
use fp8_test_support::approx::{Approx, assert_within};
use fp8_test_support::models::{Model, Norm, Rope};
use fp8_test_support::{device, flat64, models};

/// Values in (-2, 2) without a pattern.
fn wave(shape: &[usize], seed: usize, dtype: DType) -> Result<Tensor> {
    let wave = (fp8_test_support::wave(shape, seed) * 2.)?;
    Ok(wave.to_device(&device())?.to_dtype(dtype)?)
}

/// Compares with candle-nn's result in f64, within the bounds of `model` for f32.
#[track_caller]
fn assert_like_candle_nn(got: &Tensor, theirs: &Tensor, model: &Model, args: &[&Tensor]) {
    assert_eq!((got.dtype(), theirs.dtype()), (DType::F32, DType::F64));
    assert_eq!(got.dims(), theirs.dims());
    let args: Vec<Vec<f64>> = args.iter().map(|arg| flat64(arg)).collect();
    let bounds = model.forward(&args).into_iter().zip(flat64(theirs));
    // candle-nn rounds to f64, where terms of up to 16 may cancel.
    let theirs = 16.0 * 2f64.powi(24 - 53);
    let expected = bounds.map(|(bound, value)| Approx { value, ..bound }.off_by(theirs));
    let expected: Vec<Approx> = expected.collect();
    assert_within(&flat64(got), &expected, DType::F32, "candle-nn");
}

fn cpu(t: &Tensor) -> Result<Tensor> {
    Ok(t.to_device(&Device::Cpu)?)
}

/// The same values in f64 on the CPU, for candle-nn's versions.
fn wide(t: &Tensor) -> Result<Tensor> {
    Ok(cpu(t)?.to_dtype(DType::F64)?)
}

#[test]
fn same_values_as_candle_nn() -> Result<()> {
    let x = wave(&[3, 50, 129], 1, DType::F32)?;
    let (weight, bias) = (wave(&[129], 2, DType::F32)?, wave(&[129], 3, DType::F32)?);
    let norm = |center| Model::Norm(Norm { center, eps: 1e-5 });
    assert_like_candle_nn(
        &layer_norm(&x, &weight, Some(&bias), 1e-5)?,
        &candle_nn::ops::layer_norm_slow(&wide(&x)?, &wide(&weight)?, &wide(&bias)?, 1e-5)?,
        &norm(true),
        &[&x, &weight, &bias],
    );
    assert_like_candle_nn(
        &rms_norm(&x, &weight, 1e-5)?,
        &candle_nn::ops::rms_norm_slow(&wide(&x)?, &wide(&weight)?, 1e-5)?,
        &norm(false),
        &[&x, &weight],
    );
    assert_like_candle_nn(
        &softmax_last_dim(&x)?,
        &candle_nn::ops::softmax(&wide(&x)?, D::Minus1)?,
        &Model::Softmax(129),
        &[&x],
    );
    let large = (&x * 4.0)?;
    assert_like_candle_nn(
        &gelu(&large)?,
        &wide(&large)?.gelu()?,
        &Model::Gelu,
        &[&large],
    );

    let x = wave(&[2, 3, 11, 64], 1, DType::F32)?;
    // candle-nn takes tables of more positions than x has; so do we.
    let (cos, sin) = (
        wave(&[20, 32], 2, DType::F32)?,
        wave(&[20, 32], 3, DType::F32)?,
    );
    let rotation = |interleaved| {
        Model::Rope(Rope {
            d: 64,
            t: 11,
            interleaved,
        })
    };
    assert_like_candle_nn(
        &rope(&x, &cos, &sin)?,
        &candle_nn::rotary_emb::rope(&wide(&x)?, &wide(&cos)?, &wide(&sin)?)?,
        &rotation(false),
        &[&x, &cos, &sin],
    );
    assert_like_candle_nn(
        &rope_i(&x, &cos, &sin)?,
        &candle_nn::rotary_emb::rope_i(&wide(&x)?, &wide(&cos)?, &wide(&sin)?)?,
        &rotation(true),
        &[&x, &cos, &sin],
    );

    let logits = (wave(&[70, 97], 1, DType::F32)? * 8.0)?;
    let classes: Vec<u32> = (0..70).map(|i| i * 31 % 97).collect();
    let targets = Tensor::new(&classes[..], &device())?;
    let classes = classes.iter().map(|&class| Some(class as usize));
    assert_like_candle_nn(
        &cross_entropy(&logits, &targets)?,
        &candle_nn::loss::cross_entropy(&wide(&logits)?, &cpu(&targets)?)?,
        &Model::CrossEntropy(classes.collect()),
        &[&logits],
    );
    Ok(())
}

#[test]
fn sixteen_bit_results_are_f32_results_rounded_once() -> Result<()> {
    for dtype in [DType::BF16, DType::F16] {
        let x = wave(&[2, 3, 90, 62], 1, dtype)?;
        let (weight, bias) = (wave(&[62], 2, dtype)?, wave(&[62], 3, dtype)?);
        let (cos, sin) = (wave(&[90, 31], 4, dtype)?, wave(&[90, 31], 5, dtype)?);
        type Op = fn(&[Tensor]) -> Result<Tensor>;
        let ops: [(&str, Op); 8] = [
            ("layer_norm", |a| {
                layer_norm(&a[0], &a[1], Some(&a[2]), 1e-5)
            }),
            ("layer_norm without bias", |a| {
                layer_norm(&a[0], &a[1], None, 1e-5)
            }),
            ("rms_norm", |a| rms_norm(&a[0], &a[1], 1e-5)),
            ("softmax", |a| softmax_last_dim(&a[0])),
            ("causal_softmax", |a| {
                causal_softmax(&a[0].narrow(2, 0, 62)?, 1.7)
            }),
            ("rope", |a| rope(&a[0], &a[3], &a[4])),
            ("rope_i", |a| rope_i(&a[0], &a[3], &a[4])),
            ("gelu", |a| gelu(&a[0])),
        ];
        let args = [x.clone(), weight, bias, cos, sin];
        let wide = args
            .iter()
            .map(|a| a.to_dtype(DType::F32))
            .collect::<candle_core::Result<Vec<_>>>()?;
        for (name, op) in ops {
            let (got, expected) = (op(&args)?, op(&wide)?.to_dtype(dtype)?);
            assert_eq!(got.dtype(), dtype, "{name}");
            assert_eq!(flat64(&got), flat64(&expected), "{name}, {dtype:?}");
        }
        let targets = Tensor::zeros((2, 3, 90), DType::U8, &device())?;
        let loss = cross_entropy(&x, &targets)?;
        assert_eq!(loss.dtype(), DType::F32);
        assert_eq!(
            flat64(&loss),
            flat64(&cross_entropy(&x.to_dtype(DType::F32)?, &targets)?),
            "{dtype:?}"
        );
    }
    Ok(())
}

#[test]
fn causal_mask() -> Result<()> {
    for (tq, tk) in [(1, 1), (1, 5), (4, 4), (3, 7), (60, 300)] {
        let x = wave(&[2, 3, tq, tk], 1, DType::F64)?;
        let expected = models::causal_softmax(&flat64(&x), [tq, tk], 0.25);
        let y = flat64(&causal_softmax(&x, 0.25)?);
        assert_within(&y, &expected, DType::F64, &format!("{tq} x {tk}"));
        for (y, expected) in y.iter().zip(&expected) {
            assert_eq!(*y == 0.0, expected.value == 0.0, "{tq} x {tk}");
        }
    }
    let too_few_keys = causal_softmax(&wave(&[2, 4, 3], 1, DType::F32)?, 1.0)
        .unwrap_err()
        .to_string();
    assert!(
        too_few_keys.contains("causal_softmax") && too_few_keys.contains("[2, 4, 3]"),
        "{too_few_keys}"
    );
    Ok(())
}
