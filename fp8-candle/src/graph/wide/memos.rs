//! Values that a backward pass has made and may need again.

use crate::base::error::Result;
use candle_core::Tensor;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Values that were computed again or decoded in a backward pass: more than one operation may ask for one.
#[derive(Default)]
pub(crate) struct Memos(HashMap<usize, Tensor>);

/// A key for a value among the [`Memos`].
pub(super) fn new_key() -> usize {
    static KEYS: AtomicUsize = AtomicUsize::new(0);
    KEYS.fetch_add(1, Ordering::Relaxed)
}

impl Memos {
    /// The value of this key, which `compute` makes when it is first asked for.
    pub(super) fn of(
        &mut self,
        key: usize,
        compute: impl FnOnce(&mut Self) -> Result<Tensor>,
    ) -> Result<Tensor> {
        if let Some(tensor) = self.0.get(&key) {
            return Ok(tensor.clone());
        }
        let tensor = compute(self)?;
        self.0.insert(key, tensor.clone());
        Ok(tensor)
    }

    /// Whether the value of this key is there.
    pub(super) fn holds(&self, key: usize) -> bool {
        self.0.contains_key(&key)
    }

    /// Forgets a value that no operation before this one asks for.
    pub(crate) fn forget(&mut self, memo: Option<usize>) {
        if let Some(key) = memo {
            self.0.remove(&key);
        }
    }
}
