//! Announcing that a weight has changed.
//!
//! On the CPU a cached FP8 weight is compared with its source by a fingerprint of all its bits, so every change is noticed
//! and nothing has to be announced. On a GPU that would need a copy to the host: there, codes are kept only for weights
//! whose owner announces changes. The optimizers of `fp8-optim` and `resume_training` do. Code that changes such a weight in
//! another way (`Var::set`, `VarMap::load`, another optimizer) must call [`announce_change`] afterwards, or old codes stay in use.

use crate::base::error::{Error, Result};
use crate::base::sync::lock;
use crate::cast::state::StateTable;
use crate::device::fingerprint as fingerprint_of;
use candle_core::{DType, Tensor, TensorId};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

static VERSIONS: Mutex<Option<HashMap<TensorId, Weak<Shared>>>> = Mutex::new(None);

thread_local! {
    /// The changes that this thread announces, while somebody listens.
    static ANNOUNCED: RefCell<Option<Vec<WeightVersion>>> = const { RefCell::new(None) };
    static STEPS: ThreadSteps = ThreadSteps::default();
}

/// How many steps of parameters one thread has noted, also of parameters that no model is known to have. Any thread may read it.
#[derive(Debug, Clone, Default)]
pub struct ThreadSteps(Arc<AtomicU64>);

impl ThreadSteps {
    /// The count of this thread; one that stays 0 while the thread ends.
    pub fn of_this_thread() -> Self {
        STEPS.try_with(Self::clone).unwrap_or_default()
    }

    /// The count now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What `f` returns, and the versions whose change it has announced on this thread.
#[cfg(feature = "cuda")]
pub(crate) fn changes_of<R>(f: impl FnOnce() -> R) -> (R, Vec<WeightVersion>) {
    ANNOUNCED.set(Some(vec![]));
    let result = f();
    (result, ANNOUNCED.take().unwrap_or_default())
}

#[derive(Debug, Default)]
struct Shared {
    version: AtomicU64,
    /// Tables of the models that have the tensor as a parameter.
    tables: Mutex<Vec<Weak<StateTable>>>,
}

/// The version of one tensor's values, shared by its clones, and the tables of the models that have it as a parameter.
#[derive(Debug, Clone)]
pub struct WeightVersion(Arc<Shared>);

impl WeightVersion {
    /// The version of `weight`; 0 until the first change is announced.
    pub fn of(weight: &Tensor) -> Self {
        let mut versions = lock(&VERSIONS);
        let versions = versions.get_or_insert_default();
        if let Some(version) = versions.get(&weight.id()).and_then(Weak::upgrade) {
            return Self(version);
        }
        if versions.len() == versions.capacity() {
            // Forget tensors that are gone before the table grows.
            versions.retain(|_, version| version.strong_count() > 0);
        }
        let version = Arc::new(Shared::default());
        versions.insert(weight.id(), Arc::downgrade(&version));
        Self(version)
    }

    /// How many changes have been announced.
    pub fn get(&self) -> u64 {
        self.0.version.load(Ordering::Acquire)
    }

    /// Announces a change. The first announcement is also a promise to announce all later ones.
    pub fn announce_change(&self) {
        self.0.version.fetch_add(1, Ordering::AcqRel);
        self.note_step();
        ANNOUNCED.with_borrow_mut(|announced| {
            if let Some(announced) = announced {
                announced.push(self.clone());
            }
        });
    }

    /// Notes, in the latest step of each model that has the tensor as a parameter, that its optimizer's step has come: the parameter has
    /// changed, or a loss scaler has skipped the step. This announces no change.
    pub fn note_step(&self) {
        // A thread that ends saves nothing.
        let _ = STEPS.try_with(|steps| steps.0.fetch_add(1, Ordering::Relaxed));
        for table in self.tables() {
            table.note_step();
        }
    }

    /// Notes that the tensor is a parameter of the model of `table`; forgotten when all clones of this version are dropped.
    pub fn note_table(&self, table: &Arc<StateTable>) {
        let mut tables = lock(&self.0.tables);
        tables.retain(|table| table.strong_count() > 0);
        let new = Arc::downgrade(table);
        if !tables.iter().any(|known| known.ptr_eq(&new)) {
            tables.push(new);
        }
    }

    /// The tables of [`WeightVersion::note_table`] that still exist.
    pub fn tables(&self) -> Vec<Arc<StateTable>> {
        let tables = lock(&self.0.tables);
        tables.iter().filter_map(Weak::upgrade).collect()
    }
}

/// Announces that the values of `weight` (a variable's tensor, or a clone of it) have changed, so that FP8 copies are made
/// again.
///
/// Needed on a GPU only. It reaches layers that have computed with the weight before; from the first announcement they keep
/// its codes, and rely on every later change being announced.
pub fn announce_change(weight: &Tensor) {
    WeightVersion::of(weight).announce_change();
}

/// The values of a tensor at one moment, as far as their change can be noticed without a copy to the host.
///
/// Code that reads a tensor in a forward pass and again in a backward pass takes this before the first read and checks it after
/// the second, so that a change by another thread during either is noticed too.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Seen {
    id: TensorId,
    values: Values,
}

#[derive(Debug, Clone)]
enum Values {
    Fingerprint(u64),
    /// With the version itself: the registry holds it weakly.
    Announced(WeightVersion, u64),
    /// The dtype is not compared.
    Unknown,
}

/// Equal if no change was noticed.
impl PartialEq for Values {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Fingerprint(a), Self::Fingerprint(b)) => a == b,
            (Self::Announced(_, a), Self::Announced(_, b)) => a == b,
            _ => false,
        }
    }
}

impl Seen {
    /// The values of `tensor` now.
    pub(crate) fn of(tensor: &Tensor) -> Result<Self> {
        let values = match fingerprint(tensor)? {
            None => Values::Unknown,
            Some(Some(fingerprint)) => Values::Fingerprint(fingerprint),
            Some(None) => {
                let version = WeightVersion::of(tensor);
                let announced = version.get();
                Values::Announced(version, announced)
            }
        };
        let id = tensor.id();
        Ok(Self { id, values })
    }

    /// Whether changes of this tensor are noticed only if they are announced.
    pub(crate) fn is_announced(&self) -> bool {
        matches!(self.values, Values::Announced(..))
    }

    /// Whether a later change will be noticed: the first announcement is a promise to announce all later ones.
    pub(crate) fn shows_changes(&self) -> bool {
        match self.values {
            Values::Fingerprint(_) => true,
            Values::Announced(_, announced) => announced > 0,
            Values::Unknown => false,
        }
    }

    /// Whether the values equal those of `other`, which may be another tensor.
    pub(crate) fn has_values_of(&self, other: &Self) -> bool {
        self.values == other.values
    }

    /// Whether `tensor`, or what shares its storage, still has these values.
    pub(crate) fn holds(&self, tensor: &Tensor) -> Result<bool> {
        Ok(match &self.values {
            Values::Fingerprint(before) => fingerprint(tensor)?.flatten() == Some(*before),
            Values::Announced(version, before) => version.get() == *before,
            Values::Unknown => true,
        })
    }

    /// An error if `tensor`, which is `what` of `op`, has other values.
    pub(crate) fn check(&self, tensor: &Tensor, op: &str, what: &'static str) -> Result<()> {
        match self.holds(tensor)? {
            true => Ok(()),
            false => Err(Error::ChangedValues {
                op: op.to_string(),
                what,
                shape: tensor.dims().to_vec(),
                dtype: tensor.dtype(),
            }),
        }
    }
}

/// None for a dtype without fingerprints, `Some(None)` on a device that would need a copy.
fn fingerprint(tensor: &Tensor) -> Result<Option<Option<u64>>> {
    match tensor.dtype() {
        DType::F32 | DType::BF16 | DType::F16 | DType::F64 => Ok(Some(fingerprint_of(tensor)?)),
        _ => Ok(None),
    }
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
