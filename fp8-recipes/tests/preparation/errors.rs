//! Errors of a layer's forward pass can be matched.

use candle_core::{DType, Device, Module, Tensor};
use fp8_recipes::nn::Linear;
use fp8_recipes::{Error, FilesError};

#[test]
fn a_wrong_input_can_be_told_from_other_errors() {
    let zeros = |shape, dtype| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
    let layer = Linear::new(zeros((2, 3), DType::F32), None).with_path("fc");

    let error = layer.try_forward(&zeros((1, 4), DType::F32)).unwrap_err();
    let Error::Fp8(fp8_candle::Error::InFeatures { expected, got, .. }) = &error else {
        panic!("{error:?}");
    };
    assert_eq!((*expected, *got), (3, 4));
    let theirs = layer.forward(&zeros((1, 4), DType::F32)).unwrap_err();
    assert!(theirs.to_string().starts_with(&error.to_string()));

    let error = layer.try_forward(&zeros((1, 3), DType::U8)).unwrap_err();
    assert!(
        matches!(error, Error::Files(FilesError::TensorDType { .. })),
        "{error:?}"
    );
}
