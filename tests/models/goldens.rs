//! Every family against transformers' outputs of tiny models with random weights.

use candle_core::{DType, Device, Tensor};
use fp8::models::{self, CausalLm, ModelOptions};
use fp8_test_support::{golden, sqnr};
use std::collections::HashMap;

/// f32 has 24 bits, 144 dB; two layers with norms and softmaxes lose a part of them. A wrong rotation, window, scale of the
/// scores or choice of experts leaves less than 40 dB.
const LEAST: f64 = 110.;

#[test]
fn every_family_gives_the_outputs_of_transformers() {
    let path = golden("models.safetensors");
    let bytes = std::fs::read(&path).expect("the file");
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).expect("a header");
    let configs = header.metadata().clone().expect("configurations");
    assert_eq!(configs.len(), 13);
    let all = candle_core::safetensors::load(&path, &Device::Cpu).expect("tensors");
    for (family, config) in configs {
        let prefix = format!("{family}.");
        let own = all.iter().filter_map(|(name, tensor)| {
            let name = name.strip_prefix(&prefix)?;
            Some((name.to_string(), tensor.clone()))
        });
        let mut tensors: HashMap<String, Tensor> = own.collect();
        let ids = tensors.remove("ids").expect("ids");
        let expected = tensors.remove("output").expect("an output");
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("config.json"), config).expect("written");
        let weights = folder.path().join("model.safetensors");
        candle_core::safetensors::save(&tensors, weights).expect("written");
        let options = ModelOptions::new().with_dtype(DType::F32);
        let model = models::open(folder.path(), &options).expect("a model");
        let got = model.forward(&ids).expect("outputs");
        let close = sqnr(&expected, &got);
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
            let close = sqnr(&expected, &Tensor::cat(&logits, 1).expect("one tensor"));
            assert!(close >= LEAST, "{family} over a cache: {close} dB");
        }
    }
}
