//! A short run of the example on the digits.

use crate::images::data::Data;
use crate::images::epochs::Epochs;
use crate::run::{Precision, Summary, train};
use std::path::Path;

fn summary(dtype: Precision) -> anyhow::Result<Summary> {
    let data = Data::load(Some(Path::new("digits")))?;
    let epochs = Epochs {
        count: 8,
        batch: 64,
        lr: 2e-3,
        seed: 0,
    };
    Ok(train(dtype, &epochs, &data, |_, _, _| ())?.0)
}

#[test]
fn f16_and_fp8_learn_as_f32_does() -> anyhow::Result<()> {
    let plain = summary(Precision::F32)?;
    assert!(plain.test_accuracy > 0.9, "{plain:?}");
    for dtype in [Precision::F16, Precision::Fp8] {
        let scaled = summary(dtype)?;
        // Three standard deviations of the difference of two counts out of 360.
        assert!(
            (scaled.test_accuracy - plain.test_accuracy).abs() < 0.04,
            "{scaled:?} against {plain:?}"
        );
        assert!((scaled.final_train_loss / plain.final_train_loss - 1.).abs() < 0.15);
        // 23 steps of 8 epochs, two layers; the first needs no gradient of its input. Testing is one batch.
        let products = 23 * 8 * 5 + 2;
        let counted = match dtype {
            Precision::Fp8 => (scaled.fp8_matmuls, scaled.other_matmuls),
            _ => (scaled.other_matmuls, scaled.fp8_matmuls),
        };
        assert_eq!(counted, (products, 0), "{dtype}");
        assert!(scaled.out_of_range < 0.2, "{scaled:?}");
    }
    Ok(())
}
