//! Targets of the loss, and errors.

use super::*;

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
