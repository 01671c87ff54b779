//! Every family against transformers' outputs of tiny models with random weights.

use candle_core::DType;
use fp8::models::{self, ModelOptions};
use fp8_test_support::golden_models::{configs, write_model};
use fp8_test_support::sqnr;

/// f32 has 24 bits, 144 dB; two layers with norms and softmaxes lose a part of them. A wrong rotation, window, scale of the
/// scores or choice of experts leaves less than 40 dB.
const LEAST: f64 = 105.;

#[test]
fn every_family_gives_the_outputs_of_transformers() {
    let families = configs();
    assert_eq!(families.len(), 8);
    for family in families.keys() {
        let folder = tempfile::tempdir().expect("a folder");
        let golden = write_model(family, folder.path());
        let options = ModelOptions::new().with_dtype(DType::F32);
        let model = models::open(folder.path(), &options).expect("a model");
        let got = model.forward(&golden.ids).expect("outputs");
        let close = sqnr(&golden.output, &got);
        assert!(close >= LEAST, "{family}: {close} dB");
    }
}
