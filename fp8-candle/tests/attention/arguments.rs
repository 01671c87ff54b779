//! Views, single gradients, empty and wrong arguments.

use super::*;

/// Transposed views, parts of a joint projection, views that start off a 16-byte boundary, and a broadcast gradient.
#[test]
fn strided_views() -> Result<()> {
    let device = device();
    let (b, h, t, d) = (2, 3, 37, 32);
    let case = Case::new(t, t, d, true).heads(b, h, h);
    for dtype in [DType::F32, DType::BF16] {
        let [q, k, v, weights] = case.values(dtype);
        let expected = case.expected(dtype);
        let joint = Tensor::stack(&[&q, &k, &v], 0)?
            .permute((1, 3, 0, 2, 4))?
            .contiguous()?;
        let joint = Var::from_tensor(&joint.to_dtype(dtype)?.to_device(&device)?)?;
        let part = |i: usize| joint.narrow(2, i, 1)?.squeeze(2);
        let [q1, k1, v1] = [part(0)?, part(1)?, part(2)?];
        let here = weights.to_dtype(dtype)?.to_device(&device)?;

        // [b, h, t, d] as views of [b, t, 3, h, d].
        let first = |x: &Tensor| x.transpose(1, 2);
        let y = attention(&first(&q1)?, &first(&k1)?, &first(&v1)?, case.options())?;
        let got = results(&y, &here, &[&joint])?;
        let split = |grad: &Tensor| -> candle_core::Result<Vec<Tensor>> {
            (0..3)
                .map(|i| grad.narrow(2, i, 1)?.squeeze(2)?.transpose(1, 2))
                .collect()
        };
        let mut heads_first = vec![got[0].clone()];
        heads_first.extend(split(&got[1])?);
        assert_close(&heads_first, &expected, dtype, "transposed");

        let y = attention_tokens_first(&q1, &k1, &v1, case.options())?;
        assert_eq!(y.dims(), [b, t, h, d]);
        let got = results(&y, &here.transpose(1, 2)?, &[&joint])?;
        let mut tokens_first = vec![got[0].transpose(1, 2)?];
        tokens_first.extend(split(&got[1])?);
        assert_close(&tokens_first, &expected, dtype, "tokens first");

        // A view from feature 3 on.
        let odd = |x: &Tensor| {
            let x = x
                .to_dtype(dtype)?
                .pad_with_zeros(3, 3, 2)?
                .to_device(&device)?;
            x.narrow(3, 3, d)
        };
        let y = attention(&odd(&q)?, &odd(&k)?, &odd(&v)?, case.options())?;
        assert_close(&[y], &expected[..1], dtype, "unaligned");

        // The gradient of a sum has strides 0.
        let var = Var::from_tensor(&q.to_dtype(dtype)?.to_device(&device)?)?;
        let (k, v) = (
            k.to_dtype(dtype)?.to_device(&device)?,
            v.to_dtype(dtype)?.to_device(&device)?,
        );
        let grads = attention(&var, &k, &v, case.options())?
            .sum_all()?
            .backward()?;
        let ones = weights.ones_like()?;
        let [_, expected, ..] = case.model(dtype).run([&q, &k, &v, &ones].map(flat64));
        let got = grads.get(&var).expect("q has a gradient").clone();
        assert_close(&[got], &[expected], dtype, "sum");
    }
    Ok(())
}

/// Only arguments that track gradients get them.
#[test]
fn gradients_of_some_arguments() -> Result<()> {
    let device = device();
    let case = Case::new(20, 20, 32, true);
    let [q, k, v, weights] = case.values(DType::F32);
    let here = |x: &Tensor| x.to_dtype(DType::F32)?.to_device(&device);
    let expected = case.expected(DType::F32);
    let args = [here(&q)?, here(&k)?, here(&v)?];
    for i in 0..3 {
        let var = Var::from_tensor(&args[i])?;
        let mut args = args.clone();
        args[i] = var.as_tensor().clone();
        let y = attention(&args[0], &args[1], &args[2], case.options())?;
        let got = results(&y, &here(&weights)?, &[&var])?;
        let expected = &expected[i + 1..i + 2];
        assert_close(&got[1..], expected, DType::F32, &format!("argument {i}"));
    }
    Ok(())
}

/// The same bits every time.
#[test]
fn results_are_reproducible() -> Result<()> {
    let device = device();
    let case = Case::new(130, 150, 64, true).heads(1, 4, 2);
    for dtype in [DType::F32, DType::BF16] {
        let first: Vec<_> = run(&case, dtype, &device)?.iter().map(flat64).collect();
        let second: Vec<_> = run(&case, dtype, &device)?.iter().map(flat64).collect();
        assert_eq!(first, second, "{dtype:?}");
    }
    Ok(())
}

#[test]
fn empty_results() -> Result<()> {
    let device = device();
    let x = |shape: [usize; 4]| Tensor::zeros(&shape, DType::F32, &device);
    let options = AttentionOptions::default();
    let y = attention(
        &x([0, 2, 3, 8])?,
        &x([0, 2, 4, 8])?,
        &x([0, 2, 4, 8])?,
        options.clone(),
    )?;
    assert_eq!(y.dims(), [0, 2, 3, 8]);
    let y = attention(
        &x([1, 2, 0, 8])?,
        &x([1, 2, 4, 8])?,
        &x([1, 2, 4, 8])?,
        options,
    )?;
    assert_eq!(y.dims(), [1, 2, 0, 8]);
    Ok(())
}

#[test]
fn wrong_arguments_are_named() -> Result<()> {
    let device = device();
    let x = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device).unwrap();
    let causal = &AttentionOptions::default().with_causal(true);
    let plain = &AttentionOptions::default();
    let q = x(&[1, 4, 5, 8]);
    let kv = x(&[1, 4, 5, 8]);
    let text = |q: &Tensor, k: &Tensor, v: &Tensor, options: &AttentionOptions| {
        attention(q, k, v, options.clone()).unwrap_err().to_string()
    };
    for (message, part) in [
        (
            text(&x(&[4, 5, 8]), &kv, &kv, plain),
            "of q, expected four dimensions",
        ),
        (
            text(&q, &x(&[1, 3, 5, 8]), &x(&[1, 3, 5, 8]), plain),
            "[1, 3, 5, 8] of k",
        ),
        (text(&q, &x(&[1, 4, 5, 16]), &kv, plain), "8 features"),
        (text(&q, &kv, &x(&[1, 4, 6, 8]), plain), "of v"),
        (
            text(&q, &x(&[1, 4, 4, 8]), &x(&[1, 4, 4, 8]), causal),
            "at least 5 keys",
        ),
        (
            text(&q, &x(&[1, 4, 0, 8]), &x(&[1, 4, 0, 8]), plain),
            "at least 1 keys",
        ),
        (text(&q, &kv.to_dtype(DType::F16)?, &kv, plain), "F16 of k"),
        (text(&q.to_dtype(DType::U32)?, &kv, &kv, plain), "U32 of q"),
    ] {
        assert!(
            message.contains(part),
            "{message:?} does not contain {part:?}"
        );
    }
    Ok(())
}
