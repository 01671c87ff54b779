//! Records which tensors a model has loaded from a checkpoint.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// Names that a model has loaded from a [`Checkpoint`](super::Checkpoint) while it was built. Clones share the list.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device};
/// use fp8::load::Checkpoint;
/// # let dir = tempfile::tempdir()?;
/// # let path = fp8_test_support::files::fp8_model(dir.path());
/// let checkpoint = Checkpoint::open(&[path])?;
/// let loaded = checkpoint.loaded_names();
/// let vb = checkpoint.var_builder(DType::F32, &Device::Cpu)?;
/// fp8::nn::linear_no_bias(64, 32, vb.pp("fc"))?;
/// assert!(!loaded.names().contains(&"fc.bias".to_string())); // the model has no bias
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct LoadedNames(Arc<Mutex<BTreeSet<String>>>);

impl LoadedNames {
    /// The names up to now, sorted.
    pub fn names(&self) -> Vec<String> {
        let names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        names.iter().cloned().collect()
    }

    pub(super) fn note(&self, name: &str) {
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        names.insert(name.to_string());
    }
}
