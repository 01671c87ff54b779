//! A model with dequantized FP8 weights, for calibration: layers that hold codes cannot be calibrated.

use candle_core::{DType, Device, Error, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use fp8::load::Checkpoint;
use fp8::models::{Model, config_of};
use fp8::rewrite::Source;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The model of a checkpoint in f32; `dir` is for messages.
pub fn model(checkpoint: Checkpoint, dir: &Path) -> fp8::models::Result<Model> {
    let config = config_of(&checkpoint, dir)?;
    let values = Values::new(checkpoint);
    let vb = VarBuilder::from_backend(Box::new(values), DType::F32, Device::Cpu);
    Model::new(&config, vb)
}

/// The dequantized tensors of a checkpoint.
struct Values {
    checkpoint: Checkpoint,
    names: BTreeSet<String>,
    tied: BTreeMap<String, String>,
}

impl Values {
    fn new(checkpoint: Checkpoint) -> Self {
        Self {
            names: Source::names(&checkpoint).into_iter().collect(),
            tied: checkpoint.tied(),
            checkpoint,
        }
    }
}

impl SimpleBackend for Values {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let tensor = self.get_unchecked(name, dtype, device)?;
        if tensor.shape() != &shape {
            return Err(Error::UnexpectedShape {
                msg: format!("shape mismatch for {name}"),
                expected: shape,
                got: tensor.shape().clone(),
            });
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let stored = self.tied.get(name).map_or(name, String::as_str);
        let value = Source::value(&self.checkpoint, stored, dtype);
        value.map_err(Error::from)?.to_device(device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.names.contains(name) || self.tied.contains_key(name)
    }
}
