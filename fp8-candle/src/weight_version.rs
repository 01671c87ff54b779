//! Telling that a weight has changed.
//!
//! On the CPU a cached FP8 weight is compared with its source by a fingerprint of all its bits, so every change is seen and
//! nobody has to say anything. A GPU's weight cannot be looked at without a copy to the host: there, codes are kept only for
//! weights whose owner announces changes. This project's optimizer does, and `resume_training`; code that changes such a weight
//! on its own (`Var::set`, `VarMap::load`, another optimizer) has to call [`announce_change`] afterwards, or old codes stay in use.

use candle_core::{Tensor, TensorId};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

static VERSIONS: Mutex<Option<HashMap<TensorId, Weak<AtomicU64>>>> = Mutex::new(None);

/// The version of one tensor's values, shared by all who hold it.
#[derive(Debug, Clone)]
pub struct WeightVersion(Arc<AtomicU64>);

impl WeightVersion {
    /// The version of `weight`; 0 until a first change is announced.
    pub fn of(weight: &Tensor) -> Self {
        let mut versions = VERSIONS.lock().unwrap_or_else(PoisonError::into_inner);
        let versions = versions.get_or_insert_default();
        if let Some(version) = versions.get(&weight.id()).and_then(Weak::upgrade) {
            return Self(version);
        }
        if versions.len() == versions.capacity() {
            // Growing is the time to forget tensors that are gone.
            versions.retain(|_, version| version.strong_count() > 0);
        }
        let version = Arc::new(AtomicU64::new(0));
        versions.insert(weight.id(), Arc::downgrade(&version));
        Self(version)
    }

    /// How many changes were announced.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Announces a change, and with the first one that all later ones will be announced too.
    pub fn announce_change(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

/// Announces that the values of `weight` (a variable's tensor, or a clone of it) have changed: FP8 copies of it are made anew.
///
/// Needed on a GPU only. It is heard by layers that have computed with the weight before; with the first announcement they begin
/// to keep its codes, and rely on hearing of every change.
pub fn announce_change(weight: &Tensor) {
    WeightVersion::of(weight).announce_change();
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Result, Var};

    #[test]
    fn clones_share_a_version_and_others_do_not() -> Result<()> {
        let w = Var::zeros(3, candle_core::DType::F32, &Device::Cpu)?;
        let version = WeightVersion::of(w.as_tensor());
        assert_eq!(version.get(), 0);
        announce_change(&w.as_tensor().clone());
        assert_eq!(version.get(), 1);
        let other = Tensor::zeros(3, candle_core::DType::F32, &Device::Cpu)?;
        announce_change(&other);
        assert_eq!((version.get(), WeightVersion::of(&other).get()), (1, 0));
        Ok(())
    }

    #[test]
    fn versions_of_tensors_that_are_gone_are_forgotten() -> Result<()> {
        for _ in 0..10_000 {
            WeightVersion::of(&Tensor::zeros(1, candle_core::DType::F32, &Device::Cpu)?);
        }
        let versions = VERSIONS.lock().unwrap();
        assert!(versions.as_ref().map_or(0, HashMap::len) < 5_000);
        Ok(())
    }
}
