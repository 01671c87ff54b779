//! Sizes and tensors that do not fit a convolution.

use candle_core::{DType, Tensor};
use fp8_candle::conv::{ConvError, ConvKind, ConvShape, fp8_conv};
use fp8_candle::{Error, LinearPlan, Result};
use fp8_test_support::device;

fn zeros(dims: &[usize]) -> Tensor {
    Tensor::zeros(dims, DType::F32, &device()).unwrap()
}

fn conv(x: &[usize], weight: &[usize], shape: ConvShape) -> Result<Tensor> {
    fp8_conv(
        ConvKind::Conv2d,
        &zeros(x),
        &zeros(weight),
        None,
        &shape,
        &LinearPlan::new("stem.conv"),
    )
}

fn transposed(x: &[usize], weight: &[usize], shape: ConvShape) -> Result<Tensor> {
    let plan = LinearPlan::new("stem.conv");
    fp8_conv(
        ConvKind::ConvTranspose2d,
        &zeros(x),
        &zeros(weight),
        None,
        &shape,
        &plan,
    )
}

/// The message names the layer and each of `parts`.
#[track_caller]
fn refused(result: Result<Tensor>, parts: &[&str]) -> ConvError {
    let error = result.expect_err("an error");
    let message = error.to_string();
    for part in parts.iter().chain(&["`stem.conv`"]) {
        assert!(message.contains(part), "{part} not in: {message}");
    }
    match error {
        Error::Conv { source, .. } => source,
        other => panic!("{other:?}"),
    }
}

#[test]
fn sizes_of_zero() {
    let (x, w) = ([1, 4, 8, 8], [4, 4, 3, 3]);
    let plain = ConvShape::new();
    for (shape, name) in [
        (plain.with_stride([0, 1]), "stride along the height"),
        (plain.with_stride([1, 0]), "stride along the width"),
        (plain.with_dilation([0, 1]), "dilation along the height"),
        (plain.with_groups(0), "number of groups"),
    ] {
        for result in [conv(&x, &w, shape), transposed(&x, &w, shape)] {
            let error = refused(result, &[name, "is 0"]);
            assert!(matches!(error, ConvError::Zero { .. }));
        }
    }
    refused(conv(&x, &[4, 4, 0, 3], plain), &["kernel is 0"]);
    refused(conv(&[1, 4, 0, 8], &w, plain), &["input is 0"]);
    refused(conv(&x, &[0, 4, 3, 3], plain), &["output channels is 0"]);
    refused(
        conv(&[1, 0, 8, 8], &[4, 0, 3, 3], plain),
        &["channels is 0"],
    );
}

#[test]
fn channels_and_groups() {
    let plain = ConvShape::new();
    let two = plain.with_groups(2);
    let error = refused(
        conv(&[1, 3, 8, 8], &[4, 4, 3, 3], plain),
        &["3 channels", "expected 4"],
    );
    assert!(matches!(
        error,
        ConvError::Channels {
            got: 3,
            expected: 4,
            ..
        }
    ));
    refused(
        conv(&[1, 6, 8, 8], &[4, 4, 3, 3], two),
        &["6 channels", "expected 8", "2 groups of 4"],
    );
    refused(
        conv(&[1, 8, 8, 8], &[5, 4, 3, 3], two),
        &["2 groups do not divide 5 output channels"],
    );
    refused(
        transposed(&[1, 5, 8, 8], &[5, 4, 3, 3], two),
        &["2 groups do not divide 5 input channels"],
    );
    refused(
        transposed(&[1, 6, 8, 8], &[4, 4, 3, 3], two),
        &["6 channels", "expected 4"],
    );
}

#[test]
fn kernels_paddings_and_overflow() {
    let plain = ConvShape::new();
    let error = refused(
        conv(
            &[1, 1, 4, 8],
            &[1, 1, 3, 3],
            plain.with_dilation([3, 1]).with_padding([1, 0]),
        ),
        &[
            "kernel of 3",
            "dilation 3",
            "spans 7",
            "height",
            "4 + 2 x 1",
        ],
    );
    assert!(matches!(
        error,
        ConvError::Kernel {
            dim: "height",
            span: 7,
            ..
        }
    ));
    refused(
        transposed(&[1, 1, 2, 4], &[1, 1, 3, 3], plain.with_padding([2, 1])),
        &["padding of 2", "4 values", "height"],
    );
    refused(
        conv(
            &[1, 1, 4, 4],
            &[1, 1, 3, 3],
            plain.with_output_padding([0, 1]),
        ),
        &["output padding of [0, 1]"],
    );
    for shape in [
        plain.with_padding([usize::MAX / 2 + 1, 0]),
        plain.with_dilation([usize::MAX, 1]),
    ] {
        let error = refused(conv(&[1, 1, 4, 4], &[1, 1, 3, 3], shape), &["overflow"]);
        assert!(matches!(error, ConvError::Overflow { .. }));
    }
    refused(
        transposed(
            &[1, 1, 4, 4],
            &[1, 1, 3, 3],
            plain.with_stride([usize::MAX, 1]),
        ),
        &["overflow"],
    );
}

/// Results that would end the process in the allocator.
#[test]
fn results_too_large_for_memory_are_refused() {
    let plain = ConvShape::new();
    for padding in [1 << 28, usize::MAX / 4] {
        let shape = plain.with_padding([padding; 2]);
        let output = 2 * padding + 2;
        let error = refused(
            conv(&[1, 1, 4, 4], &[1, 1, 3, 3], shape),
            &["the output", &output.to_string()],
        );
        assert!(matches!(error, ConvError::TooLarge { .. }));
        let shape = plain.with_output_padding([padding; 2]);
        let error = refused(transposed(&[1, 1, 4, 4], &[1, 1, 3, 3], shape), &["values"]);
        assert!(matches!(error, ConvError::TooLarge { .. }));
    }
}

#[test]
fn ranks_dtypes_and_biases() {
    let (shape, plan) = (ConvShape::new(), LinearPlan::new("stem.conv"));
    let message = |result: Result<Tensor>| result.expect_err("an error").to_string();
    let (x, w) = (zeros(&[1, 2, 4, 4]), zeros(&[3, 2, 3, 3]));
    let flat = zeros(&[2, 4, 4]);
    let error = message(fp8_conv(ConvKind::Conv2d, &flat, &w, None, &shape, &plan));
    assert!(
        error.contains("fp8_conv2d") && error.contains("[2, 4, 4] of x"),
        "{error}"
    );
    let error = message(fp8_conv(
        ConvKind::Conv1d,
        &x,
        &zeros(&[3, 2, 3]),
        None,
        &shape,
        &plan,
    ));
    assert!(
        error.contains("fp8_conv1d") && error.contains("length"),
        "{error}"
    );
    let error = message(fp8_conv(
        ConvKind::Conv2d,
        &x,
        &zeros(&[3, 2, 3]),
        None,
        &shape,
        &plan,
    ));
    assert!(error.contains("[3, 2, 3] of weight"), "{error}");
    let error = message(fp8_conv(
        ConvKind::Conv2d,
        &x,
        &w,
        Some(&zeros(&[2])),
        &shape,
        &plan,
    ));
    assert!(error.contains("bias") && error.contains("[3]"), "{error}");
    let integers = x.to_dtype(DType::U8).unwrap();
    let error = message(fp8_conv(
        ConvKind::Conv2d,
        &integers,
        &w,
        None,
        &shape,
        &plan,
    ));
    assert!(error.contains("U8 of x"), "{error}");
    // The bias of a transposed convolution belongs to the second dimension of the weight.
    let x = zeros(&[1, 3, 4, 4]);
    let wrong = fp8_conv(
        ConvKind::ConvTranspose2d,
        &x,
        &w,
        Some(&zeros(&[3])),
        &shape,
        &plan,
    );
    assert!(message(wrong).contains("expected [2]"));
    assert!(
        fp8_conv(
            ConvKind::ConvTranspose2d,
            &x,
            &w,
            Some(&zeros(&[2])),
            &shape,
            &plan
        )
        .is_ok()
    );
}
