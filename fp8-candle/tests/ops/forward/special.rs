//! NaN, infinities, large logits and empty tensors.

use super::*;

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
    let expected = models::cross_entropy(&flat64(&x), &[Some(0), Some(1)]);
    assert!((expected.value - 0.5 * 2f64.ln()).abs() < 1e-15);
    assert_within(&flat64(&loss), &[expected], DType::F32, "loss");
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
