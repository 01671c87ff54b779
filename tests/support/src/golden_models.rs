//! The tiny models of `tests/golden/models.safetensors`.

use crate::golden;
use candle_core::{Device, Tensor};
use safetensors::SafeTensors;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

/// A model's input and transformers' output for it.
pub struct GoldenModel {
    /// Token ids, `[2, 12]`.
    pub ids: Tensor,
    /// Logits, or the last hidden state of BERT, in f32.
    pub output: Tensor,
}

/// The `config.json` of every model, by family.
pub fn configs() -> BTreeMap<String, String> {
    let bytes = fs::read(golden("models.safetensors")).expect("the file");
    let (_, header) = SafeTensors::read_metadata(&bytes).expect("a header");
    let configs = header.metadata().clone().expect("configurations");
    configs.into_iter().collect()
}

/// Writes the model of a family into `dir`.
pub fn write_model(family: &str, dir: &Path) -> GoldenModel {
    let path = golden("models.safetensors");
    let all = candle_core::safetensors::load(&path, &Device::Cpu).expect("tensors");
    let prefix = format!("{family}.");
    let own = all.iter().filter_map(|(name, tensor)| {
        let name = name.strip_prefix(&prefix)?;
        Some((name.to_string(), tensor.clone()))
    });
    let mut tensors: HashMap<String, Tensor> = own.collect();
    let ids = tensors.remove("ids").expect("ids");
    let output = tensors.remove("output").expect("an output");
    fs::write(dir.join("config.json"), &configs()[family]).expect("written");
    let weights = dir.join("model.safetensors");
    candle_core::safetensors::save(&tensors, weights).expect("written");
    GoldenModel { ids, output }
}
