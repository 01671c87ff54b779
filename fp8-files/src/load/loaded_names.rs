//! Which tensors a model has taken from a checkpoint.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// Names that a model has taken from a [`Checkpoint`](super::Checkpoint) while it was built. Clones share the list.
///
/// ```
/// # use fp8_recipes as fp8;
/// # use candle_core::{DType, Device, Tensor};
/// # use fp8_recipes::load::Checkpoint;
/// # use fp8_recipes::rewrite::{self, QuantizeOptions, Scheme};
/// # let dir = tempfile::tempdir()?;
/// # let weight = Tensor::ones((32, 64), DType::F32, &Device::Cpu)?;
/// # let bias = Tensor::zeros(32, DType::F32, &Device::Cpu)?;
/// # let tensors = [("fc.weight", weight), ("fc.bias", bias)].into();
/// # candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors"))?;
/// # let (model, fp8) = (Checkpoint::open_dir(dir.path())?, dir.path().join("fp8"));
/// # rewrite::quantize(&model, &fp8, &QuantizeOptions::new(Scheme::ChannelToken), &mut rewrite::quiet)?;
/// # let checkpoint = Checkpoint::open_dir(&fp8)?;
/// let loaded = checkpoint.loaded_names();
/// let vb = checkpoint.var_builder(DType::F32, &Device::Cpu)?;
/// fp8::nn::linear_no_bias(64, 32, vb.pp("fc"))?;
/// assert!(!loaded.names().contains(&"fc.bias".to_string())); // the model has none
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct LoadedNames(Arc<Mutex<BTreeSet<String>>>);

impl LoadedNames {
    /// The names so far, sorted.
    pub fn names(&self) -> Vec<String> {
        let names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        names.iter().cloned().collect()
    }

    pub(super) fn note(&self, name: &str) {
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        names.insert(name.to_string());
    }
}
