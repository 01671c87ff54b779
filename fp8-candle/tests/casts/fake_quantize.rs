//! Quantize and dequantize as differentiable ops.

use crate::row::{Row, tensor};
use candle_core::{DType, Tensor, Var};
use fp8_candle::{
    CastCounter, Error, Quantizer, Result, Role, cast_values_and_gradient, fake_quantize, grad_cast,
};
use fp8_core::Contraction::{Cols, Rows};
use fp8_core::{Format, Granularity};
use fp8_test_support::{device, flat};
use std::sync::atomic::Ordering;

#[test]
fn fake_quantization_passes_gradients_straight_through() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        for granularity in [Granularity::Tensorwise, Granularity::Rowwise] {
            let values: Vec<f32> = (0..60).map(|i| (i as f32 * 0.7).sin() * 3.).collect();
            let x = Var::from_tensor(
                &Tensor::from_vec(values, (3, 4, 5), &device())?.to_dtype(dtype)?,
            )?;
            let g = (x.as_tensor() * 0.37)?.detach();
            let quantizer = Quantizer::dynamic(Format::E4M3, granularity);
            let expected = quantizer.quantize(&x, Cols)?.tensor.dequantize(dtype)?;

            let y = fake_quantize(&x, &quantizer, Cols)?;
            assert_eq!((y.dtype(), y.dims()), (dtype, x.dims()));
            assert_eq!(flat(&y), flat(&expected), "{dtype:?} {granularity}");
            assert_ne!(
                flat(&y),
                flat(&x),
                "{dtype:?} {granularity}: nothing was cast"
            );
            let grads = (&y * &g)?.sum_all()?.backward()?;
            assert_eq!(
                flat(grads.get(&x).unwrap()),
                flat(&g),
                "{dtype:?} {granularity}"
            );

            // The other direction: values unchanged, the gradient cast.
            let counter = CastCounter::default();
            let counting = quantizer.clone().with_counter(counter.clone());
            let y = grad_cast(&x, &counting, Cols)?;
            assert_eq!(flat(&y), flat(&x), "{dtype:?} {granularity}");
            assert_eq!(counter.load(Ordering::Relaxed), 0);
            let grads = (&y * &g)?.sum_all()?.backward()?;
            let expected_g = quantizer.quantize(&g, Cols)?.tensor.dequantize(dtype)?;
            assert_eq!(
                flat(grads.get(&x).unwrap()),
                flat(&expected_g),
                "{dtype:?} {granularity}"
            );
            assert_ne!(flat(&expected_g), flat(&g));
            assert_eq!(counter.load(Ordering::Relaxed), 1);

            // Both, with two formats.
            let e5m2 = Quantizer::dynamic(Format::E5M2, granularity);
            let y = cast_values_and_gradient(&x, Some((&quantizer, Cols)), Some((&e5m2, Rows)))?;
            assert_eq!(flat(&y), flat(&expected));
            let grads = (&y * &g)?.sum_all()?.backward()?;
            let expected_g = e5m2.quantize(&g, Rows)?.tensor.dequantize(dtype)?;
            assert_eq!(flat(grads.get(&x).unwrap()), flat(&expected_g));
        }
    }
    Ok(())
}

#[test]
fn fake_quantization_of_views_and_constants() -> Result<()> {
    let quantizer = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise);
    let base = Var::from_tensor(&Tensor::arange(0f32, 24., &device())?.reshape((4, 6))?)?;
    for view in [base.t()?, base.narrow(1, 1, 3)?, base.narrow(0, 2, 2)?] {
        for y in [
            fake_quantize(&view, &quantizer, Cols)?,
            grad_cast(&view, &quantizer, Cols)?,
        ] {
            assert_eq!(y.dims(), view.dims());
            let error: f32 = flat(&y)
                .iter()
                .zip(flat(&view))
                .map(|(a, b)| (a - b).abs())
                .sum();
            assert!(error <= 24., "{:?}: {error}", view.dims());
            let grads = y.t()?.sqr()?.sum_all()?.backward()?;
            assert_eq!(grads.get(&base).unwrap().dims(), [4, 6]);
        }
        assert_eq!(flat(&grad_cast(&view, &quantizer, Cols)?), flat(&view));
    }
    let constant = base.detach();
    assert!(!fake_quantize(&constant, &quantizer, Cols)?.track_op());
    assert!(!grad_cast(&constant, &quantizer, Cols)?.track_op());
    let integers = constant.to_dtype(DType::U32)?;
    let error = fake_quantize(&integers, &quantizer, Cols).unwrap_err();
    assert!(matches!(error, Error::DType { .. }), "{error}");
    Ok(())
}

#[test]
fn a_delayed_gradient_cast_records_in_backward() -> Result<()> {
    let row = Row::new("l", Role::GradOutput, 2);
    let x = Var::from_tensor(&tensor(&[1., 2.]))?;
    let y = grad_cast(&x, &row.train(), Cols)?;
    row.update();
    assert_eq!(row.history(), [0., 0.], "recorded before backward");
    (&y * &tensor(&[3., -7.]))?.sum_all()?.backward()?;
    row.update();
    assert_eq!(row.history(), [7., 0.]);
    assert_eq!(row.scale(), 64.);
    Ok(())
}
