//! A model with dequantized FP8 weights, for calibration: layers that hold codes cannot be calibrated.

use anyhow::Result;
use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use fp8::load::Checkpoint;
use fp8::models::{Model, config_of};
use fp8::rewrite::Source;
use std::collections::HashMap;
use std::path::Path;

/// The model of a checkpoint in f32; `dir` is for messages.
pub fn model(checkpoint: &Checkpoint, dir: &Path, device: &Device) -> Result<Model> {
    let config = config_of(checkpoint, dir)?;
    let names = Source::names(checkpoint)
        .into_iter()
        .map(|name| (name.clone(), name));
    let mut tensors = HashMap::new();
    for (name, stored) in names.chain(checkpoint.tied()) {
        tensors.insert(name, Source::value(checkpoint, &stored, DType::F32)?);
    }
    let vb = VarBuilder::from_tensors(tensors, DType::F32, device);
    Ok(Model::new(&config, vb)?)
}
