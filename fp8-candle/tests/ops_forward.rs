//! Values of the differentiable building blocks: against candle-nn, in every dtype, and on bad input.

#[path = "common/approx.rs"]
mod approx;
#[path = "common/models.rs"]
mod models;

use approx::{Approx, assert_within};
use candle_core::{D, DType, Device, Tensor};
use fp8_candle::Result;
use fp8_candle::ops::{
    CrossEntropyOptions, causal_softmax, cross_entropy, cross_entropy_with, gelu, layer_norm,
    rms_norm, rope, rope_i, softmax_last_dim,
};
use fp8_test_support::{device, isa, on_cuda};
use models::{Model, Norm, Rope};

/// Values in (-2, 2) without a pattern.
fn wave(shape: &[usize], seed: usize, dtype: DType) -> Result<Tensor> {
    let n = shape.iter().product::<usize>();
    let values: Vec<f64> = (0..n)
        .map(|i| 2.0 * (((i + 7) * (seed * 2 + 9)) as f64 * 12.9898).sin())
        .collect();
    Ok(Tensor::from_vec(values, shape, &device())?.to_dtype(dtype)?)
}

fn flat(t: &Tensor) -> Vec<f64> {
    t.to_dtype(DType::F64)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}

/// Compares with candle-nn's result in f64, within the bounds of `model` for f32.
#[track_caller]
fn assert_like_candle_nn(got: &Tensor, theirs: &Tensor, model: &Model, args: &[&Tensor]) {
    assert_eq!((got.dtype(), theirs.dtype()), (DType::F32, DType::F64));
    assert_eq!(got.dims(), theirs.dims());
    let args: Vec<Vec<f64>> = args.iter().map(|arg| flat(arg)).collect();
    let bounds = model.forward(&args).into_iter().zip(flat(theirs));
    // candle-nn rounds to f64, where terms of up to 16 may cancel.
    let theirs = 16.0 * 2f64.powi(24 - 53);
    let expected = bounds.map(|(bound, value)| Approx { value, ..bound }.off_by(theirs));
    let expected: Vec<Approx> = expected.collect();
    assert_within(&flat(got), &expected, DType::F32, "candle-nn");
}

fn cpu(t: &Tensor) -> Result<Tensor> {
    Ok(t.to_device(&Device::Cpu)?)
}

/// The same values in f64 on the CPU, for candle-nn's versions.
fn wide(t: &Tensor) -> Result<Tensor> {
    Ok(cpu(t)?.to_dtype(DType::F64)?)
}

#[test]
fn every_instruction_set_passes() {
    if !on_cuda() {
        isa::run_again_on_each(&[]);
    }
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
            assert_eq!(flat(&got), flat(&expected), "{name}, {dtype:?}");
        }
        let targets = Tensor::zeros((2, 3, 90), DType::U8, &device())?;
        let loss = cross_entropy(&x, &targets)?;
        assert_eq!(loss.dtype(), DType::F32);
        assert_eq!(
            flat(&loss),
            flat(&cross_entropy(&x.to_dtype(DType::F32)?, &targets)?),
            "{dtype:?}"
        );
    }
    Ok(())
}

#[test]
fn causal_mask() -> Result<()> {
    for (tq, tk) in [(1, 1), (1, 5), (4, 4), (3, 7), (60, 300)] {
        let x = wave(&[2, 3, tq, tk], 1, DType::F64)?;
        let expected = models::causal_softmax(&flat(&x), [tq, tk], 0.25);
        let y = flat(&causal_softmax(&x, 0.25)?);
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

#[test]
fn future_nan_is_never_seen() -> Result<()> {
    let nan = f32::NAN;
    let x = Tensor::new(
        &[[0f32, nan, nan], [0.0, 0.0, nan], [0.0, 0.0, 0.0]],
        &device(),
    )?;
    let y = causal_softmax(&x, 1.0)?.to_vec2::<f32>()?;
    assert_eq!(
        y,
        [vec![1.0, 0.0, 0.0], vec![0.5, 0.5, 0.0], vec![1.0 / 3.0; 3]]
    );
    Ok(())
}

#[test]
fn nan_and_inf_spread_over_their_row_only() -> Result<()> {
    for bad in [f32::NAN, f32::INFINITY] {
        for position in [0, 33, 39] {
            let mut values = vec![0.5f32; 3 * 40];
            for (i, value) in values.iter_mut().enumerate() {
                *value += i as f32 * 0.01;
            }
            values[40 + position] = bad;
            let x = Tensor::from_vec(values, (3, 40), &device())?;
            let weight = Tensor::ones(40, DType::F32, &device())?;
            let results = [
                ("layer_norm", layer_norm(&x, &weight, None, 1e-5)?),
                ("rms_norm", rms_norm(&x, &weight, 1e-5)?),
                ("softmax", softmax_last_dim(&x)?),
                ("gelu", gelu(&x)?),
            ];
            for (name, y) in results {
                let rows = y.to_vec2::<f32>()?;
                assert!(
                    rows[0].iter().chain(&rows[2]).all(|y| y.is_finite()),
                    "{name}, {bad}"
                );
                assert!(
                    !rows[1][position].is_finite(),
                    "{name}, {bad}: {}",
                    rows[1][position]
                );
            }
            let targets = Tensor::new(&[0u32, 1, 2], &device())?;
            assert!(
                !cross_entropy(&x, &targets)?.to_scalar::<f32>()?.is_finite(),
                "{bad}"
            );
        }
    }
    Ok(())
}

#[test]
fn large_logits_do_not_overflow() -> Result<()> {
    let x = Tensor::new(&[[1e30f32, 0.0, -1e30], [3e38, 3e38, -3e38]], &device())?;
    assert_eq!(
        softmax_last_dim(&x)?.to_vec2::<f32>()?,
        [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]
    );
    let loss = cross_entropy(&x, &Tensor::new(&[0u32, 1], &device())?)?;
    let expected = models::cross_entropy(&flat(&x), &[Some(0), Some(1)]);
    assert!((expected.value - 0.5 * 2f64.ln()).abs() < 1e-15);
    assert_within(&flat(&loss), &[expected], DType::F32, "loss");
    Ok(())
}

#[test]
fn empty_tensors() -> Result<()> {
    let device = &device();
    let empty = |shape: &[usize]| Tensor::zeros(shape, DType::F32, device);
    let weight = Tensor::ones(5, DType::F32, device)?;
    assert_eq!(
        layer_norm(&empty(&[2, 0, 5])?, &weight, Some(&weight), 1e-5)?.dims(),
        [2, 0, 5]
    );
    assert_eq!(
        layer_norm(&empty(&[3, 0])?, &empty(&[0])?, None, 1e-5)?.dims(),
        [3, 0]
    );
    assert_eq!(rms_norm(&empty(&[0, 5])?, &weight, 1e-5)?.dims(), [0, 5]);
    assert_eq!(softmax_last_dim(&empty(&[0, 5])?)?.dims(), [0, 5]);
    assert_eq!(softmax_last_dim(&empty(&[5, 0])?)?.dims(), [5, 0]);
    assert_eq!(causal_softmax(&empty(&[2, 0, 5])?, 1.0)?.dims(), [2, 0, 5]);
    assert_eq!(causal_softmax(&empty(&[2, 0, 0])?, 1.0)?.dims(), [2, 0, 0]);
    assert_eq!(gelu(&empty(&[0])?)?.dims(), [0]);
    let x = empty(&[1, 2, 0, 4])?;
    assert_eq!(
        rope(&x, &empty(&[3, 2])?, &empty(&[3, 2])?)?.dims(),
        [1, 2, 0, 4]
    );
    let x = empty(&[1, 2, 3, 0])?;
    assert_eq!(
        rope_i(&x, &empty(&[3, 0])?, &empty(&[3, 0])?)?.dims(),
        [1, 2, 3, 0]
    );
    let loss = cross_entropy(&empty(&[0, 5])?, &Tensor::zeros(0, DType::U32, device)?)?;
    assert!(loss.to_scalar::<f32>()?.is_nan());
    Ok(())
}

#[test]
fn targets_of_every_integer_dtype_and_shape() -> Result<()> {
    let logits = wave(&[2, 3, 10], 1, DType::F32)?;
    let targets = Tensor::new(&[[0i64, 9, 4], [3, 3, 8]], &device())?;
    let expected = cross_entropy(&logits, &targets)?.to_scalar::<f32>()?;
    for dtype in [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64] {
        // Converted on the CPU: elsewhere candle cannot cast all integers.
        let targets = cpu(&targets)?.to_dtype(dtype)?.to_device(&device())?;
        let loss = cross_entropy(&logits, &targets)?.to_scalar::<f32>()?;
        assert_eq!(loss, expected, "{dtype:?}");
    }
    let strided = targets.t()?.contiguous()?.t()?;
    assert_eq!(
        cross_entropy(&logits, &strided)?.to_scalar::<f32>()?,
        expected
    );
    let one = cross_entropy(&logits.get(1)?.get(2)?, &Tensor::new(8u32, &device())?)?;
    assert!(one.to_scalar::<f32>()?.is_finite());
    Ok(())
}

#[test]
fn ignored_targets() -> Result<()> {
    let device = &device();
    let logits = wave(&[4, 6], 1, DType::F64)?;
    for ignored in [-100i64, 6, 5] {
        let targets = Tensor::new(&[3, ignored, 0, ignored], device)?;
        let options = CrossEntropyOptions::default().with_ignore_index(ignored);
        let loss = cross_entropy_with(&logits, &targets, options)?.to_scalar::<f64>()?;
        let kept = Tensor::stack(&[logits.get(0)?, logits.get(2)?], 0)?;
        let expected =
            cross_entropy(&kept, &Tensor::new(&[3i64, 0], device)?)?.to_scalar::<f64>()?;
        assert_eq!(loss, expected, "ignoring {ignored}");
    }
    Ok(())
}

#[test]
fn errors_name_operation_expected_and_got() -> Result<()> {
    let device = &device();
    let x = wave(&[2, 4], 1, DType::F32)?;
    let q = wave(&[1, 1, 2, 4], 1, DType::F32)?;
    let (w4, w3) = (wave(&[4], 1, DType::F32)?, wave(&[3], 1, DType::F32)?);
    let scalar = Tensor::new(1f32, device)?;
    let angles = wave(&[2, 2], 1, DType::F32)?;
    // Only the CPU checks targets.
    let classes = |targets: &[i64]| cross_entropy(&cpu(&x)?, &Tensor::new(targets, &Device::Cpu)?);
    let cases: Vec<(Result<Tensor>, &[&str])> = vec![
        (
            layer_norm(&x, &w3, None, 1e-5),
            &["layer_norm", "weight", "[4]", "[3]"],
        ),
        (
            layer_norm(&x, &w4, Some(&w3), 1e-5),
            &["layer_norm", "bias", "[4]", "[3]"],
        ),
        (
            layer_norm(&x, &w4.to_dtype(DType::BF16)?, None, 1e-5),
            &["layer_norm", "weight", "f32", "BF16"],
        ),
        (
            layer_norm(&scalar, &w4, None, 1e-5),
            &["layer_norm", "dimension", "[]"],
        ),
        (
            rms_norm(&x, &x, 1e-5),
            &["rms_norm", "weight", "[4]", "[2, 4]"],
        ),
        (
            rms_norm(&x.to_dtype(DType::U32)?, &w4, 1e-5),
            &["rms_norm", "f32, bf16, f16 or f64", "U32"],
        ),
        (
            softmax_last_dim(&scalar),
            &["softmax_last_dim", "dimension", "[]"],
        ),
        (
            softmax_last_dim(&x.to_dtype(DType::U8)?),
            &["softmax_last_dim", "f32", "U8"],
        ),
        (causal_softmax(&w4, 1.0), &["causal_softmax", "keys", "[4]"]),
        (gelu(&x.to_dtype(DType::I64)?), &["gelu", "f32", "I64"]),
        (rope(&x, &angles, &angles), &["rope", "[2, 4]"]),
        (
            rope(&q.narrow(3, 0, 3)?, &angles, &angles),
            &["rope", "even", "[1, 1, 2, 3]"],
        ),
        (
            rope(&q, &angles.narrow(0, 0, 1)?, &angles),
            &["rope", "cos", "[2, 2]", "[1, 2]"],
        ),
        (
            rope_i(&q, &angles, &x),
            &["rope_i", "sin", "[2, 2]", "[2, 4]"],
        ),
        (
            rope_i(&q, &angles, &angles.to_dtype(DType::F64)?),
            &["rope_i", "sin", "f32", "F64"],
        ),
        (
            cross_entropy(&x, &w4),
            &["cross_entropy", "targets", "[2]", "[4]"],
        ),
        (
            cross_entropy(&x, &w4.narrow(0, 0, 2)?),
            &["cross_entropy", "targets", "integer", "F32"],
        ),
        (
            classes(&[1, 4]),
            &["cross_entropy", "target 4 ", "position 1", "4 classes"],
        ),
        (
            classes(&[-7, 0]),
            &["cross_entropy", "target -7 ", "position 0", "4 classes"],
        ),
    ];
    for (i, (result, words)) in cases.into_iter().enumerate() {
        let message = match result {
            Err(error) => error.to_string(),
            Ok(y) => panic!("case {i} ({words:?}) gave {y}"),
        };
        for word in words {
            assert!(
                message.contains(word),
                "case {i}: `{word}` is not in `{message}`"
            );
        }
    }
    Ok(())
}
