//! Hidden and ignored positions, views, empty tensors.

use super::*;

#[test]
fn strided_arguments_and_gradients() -> Result<()> {
    for Case { name, args, op, .. } in cases(4) {
        // The same values, stored with the last two dimensions swapped.
        let swap = |t: &Tensor| {
            if t.rank() < 2 {
                Ok(t.clone())
            } else {
                t.transpose(D::Minus1, D::Minus2)
            }
        };
        let plain = vars(&args, DType::F64);
        let strided = args
            .iter()
            .map(|a| Var::from_tensor(&swap(a)?.contiguous()?))
            .collect::<candle_core::Result<Vec<_>>>()?;
        let strided_args = strided
            .iter()
            .map(|v| swap(v))
            .collect::<candle_core::Result<Vec<_>>>()?;
        let (y, y_strided) = (op(&tensors(&plain))?, op(&strided_args)?);
        assert_eq!(flat64(&y), flat64(&y_strided), "{name}");
        // Transposing the results makes the gradients that come back strided too.
        let grads = weighted_sum(&swap(&y)?.contiguous()?)?.backward()?;
        let strided_grads = weighted_sum(&swap(&y_strided)?.contiguous()?)?.backward()?;
        for (plain, strided) in plain.iter().zip(&strided) {
            let grad = flat64(grads.get(plain).unwrap());
            assert_eq!(
                grad,
                flat64(&swap(strided_grads.get(strided).unwrap())?),
                "{name}"
            );
        }
    }
    Ok(())
}

#[test]
fn hidden_logits_get_no_gradient_from_nan() -> Result<()> {
    let x = Var::from_tensor(&wave(&[3, 4], 1))?;
    let nan_where_hidden = Tensor::new(
        &[
            [1.0, 2.0, f64::NAN, f64::NAN],
            [3.0, 4.0, 5.0, f64::NAN],
            [6.0, 7.0, 8.0, 9.0],
        ],
        &device(),
    )?;
    let grads = (causal_softmax(&x, 1.0)? * nan_where_hidden)?
        .sum_all()?
        .backward()?;
    let grad = grads.get(&x).unwrap().to_vec2::<f64>()?;
    for (i, row) in grad.iter().enumerate() {
        for (j, &g) in row.iter().enumerate() {
            if j > i + 1 {
                assert_eq!(g, 0.0, "hidden [{i}, {j}]");
            } else {
                assert!(g.is_finite() && g != 0.0, "visible [{i}, {j}]: {g}");
            }
        }
    }
    Ok(())
}

#[test]
fn ignored_positions_get_no_gradient() -> Result<()> {
    let options = CrossEntropyOptions::default().with_ignore_index(-1);
    let logits = Var::from_tensor(&wave(&[3, 4], 1))?;
    let targets = Tensor::new(&[2i64, -1, 0], &device())?;
    let grads = cross_entropy_with(&logits, &targets, options)?.backward()?;
    let ignored = grads.get(&logits).unwrap().to_vec2::<f64>()?;
    assert_eq!(ignored[1], [0.0; 4]);

    // The other rows are as if the ignored one were not there.
    let kept = Var::from_tensor(&Tensor::cat(
        &[logits.narrow(0, 0, 1)?, logits.narrow(0, 2, 1)?],
        0,
    )?)?;
    let grads = cross_entropy(&kept, &Tensor::new(&[2i64, 0], &device())?)?.backward()?;
    let kept = grads.get(&kept).unwrap().to_vec2::<f64>()?;
    assert_eq!([&ignored[0], &ignored[2]], [&kept[0], &kept[1]]);

    let targets = Tensor::new(&[-1i64, -1, -1], &device())?;
    let loss = cross_entropy_with(&logits, &targets, options)?;
    assert!(loss.to_scalar::<f64>()?.is_nan());
    assert_eq!(flat64(loss.backward()?.get(&logits).unwrap()), [0.0; 12]);
    Ok(())
}

#[test]
fn empty_tensors_have_empty_gradients() -> Result<()> {
    if skipped_on_cuda("candle itself makes no empty gradients there") {
        return Ok(());
    }
    let weight = Var::from_tensor(&wave(&[7], 1))?;
    let x = Var::zeros((0, 7), DType::F64, &device())?;
    let y = layer_norm(&x, &weight, Some(&weight), 1e-5)?.add(&rms_norm(
        &gelu(&softmax_last_dim(&x)?)?,
        &weight,
        1e-5,
    )?)?;
    let grads = y.sum_all()?.backward()?;
    assert_eq!(grads.get(&x).unwrap().dims(), [0, 7]);
    assert_eq!(flat64(grads.get(&weight).unwrap()), [0.0; 7]);
    Ok(())
}
