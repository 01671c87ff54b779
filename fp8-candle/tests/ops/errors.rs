//! Errors can be matched where they arise, and keep their message inside candle's `Result`.

use candle_core::{DType, Device, Tensor};
use fp8_candle::ops::cross_entropy;
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
