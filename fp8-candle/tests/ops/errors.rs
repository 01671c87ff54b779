//! Errors can be matched where they arise, and keep their message inside candle's `Result`.

use candle_core::{DType, Device, Tensor};
use fp8_candle::ops::{Activation, cross_entropy, detached};
use fp8_candle::{Error, Fp8Tensor, Quantizer};
use fp8_core::{Contraction, Format, Granularity};

#[test]
fn kinds_can_be_matched() {
    let integers = Tensor::zeros((2, 3), DType::U32, &Device::Cpu).unwrap();
    let quantizer = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise);
    let error = Fp8Tensor::quantize(&integers, &quantizer, Contraction::Cols).unwrap_err();
    assert!(
        matches!(
            error,
            Error::DType {
                got: DType::U32,
                ..
            }
        ),
        "{error}"
    );

    let logits = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
    let targets = Tensor::new(&[0u32, 3], &Device::Cpu).unwrap();
    let error = cross_entropy(&logits, &targets).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Target {
                target: 3,
                position: 1,
                classes: 3,
                ..
            }
        ),
        "{error}"
    );
}

/// Those of operations outside any graph, which get the gradient of the result from their caller.
#[test]
fn gradients_that_do_not_fit_are_refused() {
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
    let (x, short, weight) = (zeros(&[3, 4]), zeros(&[2, 4]), zeros(&[4]));
    let tall = zeros(&[4, 3]);
    let softmax = |y: &Tensor, grad: &Tensor, causal| {
        detached::softmax_gradient(y, grad, causal, 1.).map(drop)
    };
    let activation =
        |grad: &Tensor| detached::activation_gradient(Activation::Gelu, &x, 2., grad).map(drop);
    let norm = |center, weight: &Tensor, grad: &Tensor| {
        detached::norm_gradients(center, &x, weight, grad, 1e-5, 1.).map(drop)
    };
    for (case, result) in [
        softmax(&x, &short, false),
        softmax(&x, &short, true),
        // Fewer keys than queries, and no queries.
        softmax(&tall, &tall, true),
        softmax(&weight, &weight, true),
        activation(&short),
        norm(true, &weight, &short),
        norm(false, &weight, &short),
        norm(false, &zeros(&[3]), &x),
    ]
    .into_iter()
    .enumerate()
    {
        let is_shape = matches!(result, Err(Error::Shape { .. }));
        assert!(is_shape, "case {case}: {result:?}");
    }
    let wide = x.to_dtype(DType::F64).unwrap();
    for result in [
        softmax(&x, &wide, false),
        activation(&wide),
        norm(true, &weight, &wide),
    ] {
        assert!(matches!(result, Err(Error::DType { .. })), "{result:?}");
    }
    for result in [
        softmax(&x, &x, true),
        activation(&x),
        norm(true, &weight, &x),
    ] {
        assert!(result.is_ok(), "{result:?}");
    }
}

#[test]
fn an_error_of_candle_passes_through_unchanged() {
    let theirs = || candle_core::Error::Msg("from candle".into());
    let ours = Error::from(theirs());
    assert_eq!(ours.to_string(), theirs().to_string());
    assert!(matches!(ours.into(), candle_core::Error::Msg(_)));
}

#[test]
fn candle_keeps_the_message() {
    let ours = || Error::NoRow { row: 4, rows: 2 };
    let theirs = candle_core::Error::from(ours()).to_string();
    // A backtrace may follow.
    assert!(theirs.starts_with(&ours().to_string()), "{theirs}");
}
