use super::*;

use crate::ops::{LinearOptions, cross_entropy_with, linear_with};
use candle_core::{Device, Var};
use fp8_test_support::{apart, flat, wave_f32};

const EPS: f64 = f32::EPSILON as f64;

const ROWS: usize = 23;

const IGNORED: i64 = -100;

fn targets(classes: usize) -> Result<Tensor> {
    // The first rows, so a whole part where parts are small, and some others are ignored.
    let target = |row: usize| match row < 5 || row.is_multiple_of(7) {
        true => IGNORED,
        false => (row * 31 % classes) as i64,
    };
    let targets: Vec<i64> = (0..ROWS).map(target).collect();
    Ok(Tensor::from_vec(targets, ROWS, &Device::Cpu)?)
}

/// The loss by the two operations, and its gradients.
fn composed(x: &Var, weight: &Var, targets: &Tensor, dtype: Option<DType>) -> Result<[Tensor; 3]> {
    let options = LinearOptions::default().with_operands(dtype);
    let logits = linear_with(&x.to_dtype(DType::F32)?, weight, None, options)?;
    let options = CrossEntropyOptions::default().with_ignore_index(IGNORED);
    let loss = cross_entropy_with(&logits, targets, options)?;
    let grads = loss.backward()?;
    let of = |var: &Var| grads.get(var).cloned().expect("a gradient");
    Ok([loss, of(x), of(weight)])
}

#[test]
fn any_parts_give_the_loss_of_all_logits() -> Result<()> {
    let (inputs, classes) = (40, 130);
    for dtype in [None, Some(DType::BF16)] {
        let x = Var::from_tensor(&wave_f32(&[ROWS, inputs], 1))?;
        let weight = Var::from_tensor(&wave_f32(&[classes, inputs], 2))?;
        let targets = targets(classes)?;
        let expected = composed(&x, &weight, &targets, dtype)?;
        for rows_at_once in [1, 4, 9, 22, 23, 1000] {
            let products = Products::new(OP, dtype, DType::F32)?;
            let call = Call {
                products,
                dtype: DType::F32,
                weight: products.operand(&weight)?,
                options: CrossEntropyOptions::default().with_ignore_index(IGNORED),
                wanted: [true; 2],
                rows_at_once,
            };
            let (loss, gradients) = call.compute(&x.detach(), &targets)?;
            let [of_x, of_weight] = gradients.map(|gradient| gradient.expect("a gradient"));
            // Losses are below 10, in 23 parts at most; gradients are sums of 130 or 23 products below 1, whose factors may
            // be rounded to bf16 from values that differ in their last bits.
            let far = apart(&loss, &expected[0]);
            assert!(
                far <= 10. * 24. * EPS,
                "{dtype:?} {rows_at_once}: loss {far:e}"
            );
            let rounding = if dtype.is_some() {
                1. / 256.
            } else {
                138. * EPS
            };
            for (what, got, expected) in [
                ("x", of_x, &expected[1]),
                ("weight", of_weight, &expected[2]),
            ] {
                let far = apart(&got, expected);
                let largest = flat(expected).iter().fold(0f32, |max, g| max.max(g.abs()));
                let bound = rounding * f64::from(largest);
                assert!(
                    far <= bound,
                    "{dtype:?} {rows_at_once}: {what} {far:e}, bound {bound:e}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_have_the_shape_and_dtype_of_their_tensors() -> Result<()> {
    let targets = Tensor::new(&[[1u32, 0, 4], [2, 2, 3]], &Device::Cpu)?;
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        let x = Var::from_tensor(&wave_f32(&[2, 3, 8], 1).to_dtype(dtype)?)?;
        let weight = Var::from_tensor(&wave_f32(&[5, 8], 2).to_dtype(dtype)?)?;
        let loss =
            linear_cross_entropy(&x, &weight, &targets, LinearCrossEntropyOptions::default())?;
        assert_eq!(loss.dtype(), wide_dtype(dtype));
        let grads = (loss * 3.)?.backward()?;
        for var in [&x, &weight] {
            let grad = grads.get(var).expect("a gradient");
            assert_eq!((grad.dims(), grad.dtype()), (var.dims(), dtype));
        }
        // Three times the gradients of the loss alone, to the roundings of each.
        let alone =
            linear_cross_entropy(&x, &weight, &targets, LinearCrossEntropyOptions::default())?;
        let alone = alone.backward()?;
        let times = (alone.get(&x).expect("a gradient").to_dtype(DType::F32)? * 3.)?;
        let far = apart(
            &grads.get(&x).expect("a gradient").to_dtype(DType::F32)?,
            &times,
        );
        let rounding = if dtype == DType::BF16 {
            1. / 128.
        } else {
            1. / 1024.
        };
        assert!(far <= 3. * rounding, "{dtype:?} {far:e}");
    }
    Ok(())
}

#[test]
fn gradients_are_computed_only_where_they_are_asked_for() -> Result<()> {
    let targets = Tensor::new(&[1u32, 0], &Device::Cpu)?;
    let options = LinearCrossEntropyOptions::default().with_operands(DType::BF16);
    let (x, weight) = (
        Var::from_tensor(&wave_f32(&[2, 8], 1))?,
        Var::from_tensor(&wave_f32(&[5, 8], 2))?,
    );
    let frozen = linear_cross_entropy(&x, &weight.detach(), &targets, options)?.backward()?;
    assert!(frozen.get(&x).is_some() && frozen.get(&weight).is_none());
    let head = linear_cross_entropy(&x.detach(), &weight, &targets, options)?.backward()?;
    assert!(head.get(&x).is_none() && head.get(&weight).is_some());
    let none = linear_cross_entropy(&x.detach(), &weight.detach(), &targets, options)?;
    assert!(!none.track_op());
    Ok(())
}

#[test]
fn no_targets_give_nan_and_no_gradient() -> Result<()> {
    let options = LinearCrossEntropyOptions::default().with_ignore_index(IGNORED);
    let (x, weight) = (
        Var::from_tensor(&wave_f32(&[2, 8], 1))?,
        Var::from_tensor(&wave_f32(&[5, 8], 2))?,
    );
    let ignored = Tensor::new(&[IGNORED, IGNORED], &Device::Cpu)?;
    let loss = linear_cross_entropy(&x, &weight, &ignored, options)?;
    assert!(loss.to_scalar::<f32>()?.is_nan());
    let grads = loss.backward()?;
    assert!(
        flat(grads.get(&weight).expect("a gradient"))
            .iter()
            .all(|&g| g == 0.)
    );
    let none = Tensor::zeros(0, DType::U32, &Device::Cpu)?;
    let loss = linear_cross_entropy(&x.narrow(0, 0, 0)?, &weight, &none, options)?;
    assert!(loss.to_scalar::<f32>()?.is_nan());
    Ok(())
}

#[test]
fn misfits_are_errors() -> Result<()> {
    let options = LinearCrossEntropyOptions::default();
    let (x, weight) = (wave_f32(&[2, 8], 1), wave_f32(&[5, 8], 2));
    let message = |x: &Tensor, weight: &Tensor, targets: &Tensor, options| {
        linear_cross_entropy(x, weight, targets, options)
            .unwrap_err()
            .to_string()
    };
    let targets = Tensor::new(&[1u32, 5], &Device::Cpu)?;
    let error = message(&x, &weight, &targets, options);
    assert!(error.contains("target 5") && error.contains('5'), "{error}");
    let error = message(&x, &weight, &targets.narrow(0, 0, 1)?, options);
    assert!(
        error.contains("linear_cross_entropy") && error.contains("[2]"),
        "{error}"
    );
    let error = message(&x, &weight.narrow(1, 0, 7)?, &targets, options);
    assert!(error.contains("[out, 8]"), "{error}");
    let error = message(&x, &weight, &targets.to_dtype(DType::F32)?, options);
    assert!(error.contains("integer"), "{error}");
    let error = message(&x, &weight, &targets, options.with_operands(DType::F16));
    assert!(error.contains("bf16") && error.contains("f16"), "{error}");
    Ok(())
}
