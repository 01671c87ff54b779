//! Every family against transformers' outputs of tiny models with random weights.

use candle_core::{DType, Tensor};
use fp8::models::{self, CausalLm, ModelOptions};
use fp8_test_support::golden_models::{configs, write_model};
use fp8_test_support::sqnr;

/// f32 has 24 bits, 144 dB; two layers with norms and softmaxes lose a part of them. A wrong rotation, window, scale of the
/// scores or choice of experts leaves less than 40 dB.
const LEAST: f64 = 110.;

#[test]
fn every_family_gives_the_outputs_of_transformers() {
    let families = configs();
    assert_eq!(families.len(), 13);
    for family in families.keys() {
        let folder = tempfile::tempdir().expect("a folder");
        let golden = write_model(family, folder.path());
        let options = ModelOptions::new().with_dtype(DType::F32);
        let model = models::open(folder.path(), &options).expect("a model");
        let (ids, expected) = (&golden.ids, &golden.output);
        let got = model.forward(ids).expect("outputs");
        let close = sqnr(expected, &got);
        println!("{family}: {close:.1} dB");
        assert!(close >= LEAST, "{family}: {close} dB");
        let Some(model) = model.llama() else {
            continue;
        };
        // The same over a cache, read at once, token by token, and in between.
        let tokens = ids.dim(1).expect("tokens");
        for pieces in [vec![tokens], vec![1; tokens], vec![9, 2, 1]] {
            let mut cache = model.new_cache(2, tokens).expect("a cache");
            let mut logits = vec![];
            for piece in pieces {
                let ids = ids.narrow(1, cache.len(), piece).expect("ids");
                logits.push(model.forward_cached(&ids, &mut cache).expect("logits"));
            }
            let close = sqnr(expected, &Tensor::cat(&logits, 1).expect("one tensor"));
            assert!(close >= LEAST, "{family} over a cache: {close} dB");
        }
    }
}
