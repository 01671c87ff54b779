//! Views, NaN and infinities, and the loss.

use super::*;

/// Views that start at any element give the bits of copies.
#[test]
fn views_off_16_bytes() -> Result<()> {
    if skipped_on_cpu() {
        return Ok(());
    }
    let (t, d) = (9, 64);
    let x = wave(&[2, 3, t, d], 1);
    let targets = Tensor::from_vec(
        (0..2 * 3 * t as i64).collect::<Vec<_>>(),
        (2, 3, t),
        &device(),
    )?;
    let long = wave(&[2, 1, 3, 1536], 1);
    let (weight, bias) = (wave(&[d], 2), wave(&[d], 3));
    let (long_weight, angles) = (wave(&[1536], 2), wave(&[t, d / 2], 4));
    let cross_entropy =
        |a: &[Tensor]| cross_entropy_with(&a[0], &targets, CrossEntropyOptions::default());
    type Case<'a> = (&'a str, Op<'a>, Vec<&'a Tensor>);
    let cases: Vec<Case<'_>> = vec![
        (
            "layer_norm",
            &|a| layer_norm(&a[0], &a[1], Some(&a[2]), 1e-5),
            vec![&x, &weight, &bias],
        ),
        (
            "rms_norm",
            &|a| rms_norm(&a[0], &a[1], 1e-5),
            vec![&x, &weight],
        ),
        (
            "rms_norm of long rows",
            &|a| rms_norm(&a[0], &a[1], 1e-5),
            vec![&long, &long_weight],
        ),
        ("softmax", &|a| softmax_last_dim(&a[0]), vec![&x]),
        (
            "softmax of long rows",
            &|a| softmax_last_dim(&a[0]),
            vec![&long],
        ),
        ("causal_softmax", &|a| causal_softmax(&a[0], 0.7), vec![&x]),
        ("gelu", &|a| gelu(&a[0]), vec![&x]),
        ("rope", &|a| rope(&a[0], &a[1], &a[1]), vec![&x, &angles]),
        (
            "rope_i",
            &|a| rope_i(&a[0], &a[1], &a[1]),
            vec![&x, &angles],
        ),
        ("cross_entropy", &cross_entropy, vec![&x]),
    ];
    for dtype in DTYPES {
        for (name, op, args) in &cases {
            let gradients = |offset: usize| -> Result<Vec<Vec<f64>>> {
                let mut vars = Vec::new();
                let mut views = Vec::new();
                for arg in args {
                    let n = arg.elem_count();
                    let padded = arg.flatten_all()?.pad_with_zeros(0, offset, 0)?;
                    let var = Var::from_tensor(&padded.to_dtype(dtype)?.to_device(&device())?)?;
                    views.push(var.narrow(0, offset, n)?.reshape(arg.shape())?);
                    vars.push(var);
                }
                let y = op(&views)?;
                let weights = weights(&y)?;
                let grads = (&y * weights)?.sum_all()?.backward()?;
                let mut out = vec![flat64(&y)];
                for var in &vars {
                    let Some(grad) = grads.get(var) else {
                        panic!("{name}: an argument has no gradient");
                    };
                    out.push(flat64(&grad.narrow(
                        0,
                        offset,
                        var.elem_count() - offset,
                    )?));
                }
                Ok(out)
            };
            let aligned = gradients(0)?;
            for offset in [1, 2, 5] {
                assert_eq!(
                    gradients(offset)?,
                    aligned,
                    "{name}, {dtype:?}, at {offset}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn nan_and_inf_as_on_the_cpu() -> Result<()> {
    if skipped_on_cpu() {
        return Ok(());
    }
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        for (d, position) in [(1, 0), (40, 0), (40, 33), (40, 39), (1500, 1234)] {
            let mut values = flat64(&wave(&[3, d], 1));
            values[d + position] = bad;
            let x = Tensor::from_vec(values, (3, d), &Device::Cpu)?;
            let parameters = [x.clone(), wave(&[d], 2), wave(&[d], 3)];
            let name = |op: &str| format!("{op} with {bad} at {position} of {d}");
            assert_like_cpu(
                &name("layer_norm"),
                &|a| layer_norm(&a[0], &a[1], Some(&a[2]), 1e-2),
                &parameters,
            )?;
            assert_like_cpu(
                &name("rms_norm"),
                &|a| rms_norm(&a[0], &a[1], 0.5),
                &parameters[..2],
            )?;
            let x = [x];
            assert_like_cpu(&name("softmax"), &|a| softmax_last_dim(&a[0]), &x)?;
            assert_like_cpu(&name("gelu"), &|a| gelu(&a[0]), &x)?;
            let targets = Tensor::new(&[0u32, 0, d as u32 - 1], &Device::Cpu)?;
            assert_like_cpu(
                &name("cross_entropy"),
                &|a| {
                    let targets = targets.to_device(a[0].device())?;
                    cross_entropy_with(&a[0], &targets, CrossEntropyOptions::default())
                },
                &x,
            )?;
        }
    }
    // Rows with only -Inf have no softmax.
    let lowest = Tensor::full(f64::NEG_INFINITY, (2, 40), &Device::Cpu)?;
    assert_like_cpu("softmax of -Inf", &|a| softmax_last_dim(&a[0]), &[lowest])?;
    Ok(())
}

/// Loss and gradient of `logits` on the GPU, the loss multiplied by `factor` afterwards.
fn loss_and_gradient(
    logits: &Tensor,
    targets: &Tensor,
    ignore_index: Option<i64>,
    factor: f64,
) -> Result<(f64, Vec<Vec<f64>>)> {
    let logits = Var::from_tensor(&logits.to_device(&device())?)?;
    let options = CrossEntropyOptions::default().with_ignore_index(ignore_index);
    let loss = cross_entropy_with(&logits, &targets.to_device(&device())?, options)?;
    let grads = (&loss * factor)?.backward()?;
    let Some(grad) = grads.get(&logits) else {
        panic!("the logits have no gradient");
    };
    let classes = logits.dims()[logits.rank() - 1];
    let rows = flat64(grad).chunks(classes).map(<[f64]>::to_vec).collect();
    Ok((flat64(&loss)[0], rows))
}

#[test]
fn targets_stay_on_the_device() -> Result<()> {
    if skipped_on_cpu() {
        return Ok(());
    }
    // f64 is composed of candle's primitives.
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        let logits = wave(&[6, 10], 1).to_dtype(dtype)?;
        let targets = Tensor::new(&[0i64, 9, 4, 3, 3, 8], &Device::Cpu)?;
        let (loss, gradient) = loss_and_gradient(&logits, &targets, None, 3.0)?;
        assert!(loss.is_finite());
        for kind in [DType::U8, DType::U32, DType::I16, DType::I32] {
            let same = loss_and_gradient(&logits, &targets.to_dtype(kind)?, None, 3.0)?;
            assert_eq!(same, (loss, gradient.clone()), "{kind:?}");
        }

        for bad in [10i64, -1, i64::MIN, i64::MAX, 1 << 32] {
            let targets = Tensor::new(&[0, bad, -100, 3, 3, 8], &Device::Cpu)?;
            let (loss, gradient) = loss_and_gradient(&logits, &targets, Some(-100), 1.0)?;
            assert!(loss.is_nan(), "{dtype:?}, target {bad}: {loss}");
            for (row, values) in gradient.iter().enumerate() {
                let expected = |g: &f64| match row {
                    1 => g.is_nan(),
                    2 => *g == 0.0,
                    _ => g.is_finite() && *g != 0.0,
                };
                assert!(
                    values.iter().all(expected),
                    "{dtype:?}, target {bad}, row {row}: {values:?}"
                );
            }
        }

        let ignored = Tensor::full(7i64, 6, &Device::Cpu)?;
        let (loss, gradient) = loss_and_gradient(&logits, &ignored, Some(7), 1.0)?;
        assert!(loss.is_nan());
        assert_eq!(gradient, vec![vec![0.0; 10]; 6]);
    }
    Ok(())
}
