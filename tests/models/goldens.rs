//! Every family against transformers' outputs of tiny models with random weights.

use candle_core::{DType, Device, Tensor};
use fp8::models::{self, CausalLm, ModelOptions};
use fp8::{Fp8Layer, Fp8Module, Visitor};
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

/// The dtype of an embedding's table.
struct Table(Option<DType>);

impl Visitor for Table {
    fn layer(&mut self, _: &dyn Fp8Layer) {}

    fn tensor(&mut self, path: Option<&str>, tensor: &Tensor) {
        if path.is_some_and(|path| path.ends_with("embed_tokens.weight")) {
            self.0 = Some(tensor.dtype());
        }
    }
}

#[test]
fn a_16_bit_embedding_stays_in_16_bits() {
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let dir = tempfile::tempdir().unwrap();
        write_model("llama", dir.path());
        let path = dir.path().join("model.safetensors");
        let mut tensors = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
        let table = tensors.get_mut("model.embed_tokens.weight").unwrap();
        *table = table.to_dtype(dtype).unwrap();
        candle_core::safetensors::save(&tensors, path).unwrap();
        let options = ModelOptions::new().with_dtype(DType::F32);
        let mut table = Table(None);
        models::open(dir.path(), &options)
            .unwrap()
            .visit(&mut table);
        assert_eq!(table.0, Some(dtype));
    }
}
