//! What a node keeps of a value for its backward pass.

use super::codes::Coded;
use super::value::Value;
use crate::base::error::Result;
use candle_core::Tensor;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A value that the backward pass can have again: to the bit, but for codes and what is computed from them.
#[derive(Clone)]
pub(crate) enum Kept {
    Tensor(Tensor),
    /// An argument of the node, which candle's graph holds in any case.
    Argument(Tensor),
    /// Rounded to FP8.
    Codes(Coded),
    /// Computed when it is first asked for.
    Value(Value),
    /// Computed from other kept values.
    Again(Arc<Again>),
}

type Compute = dyn Fn(&mut Memos) -> Result<Tensor> + Send + Sync;

pub(crate) struct Again {
    key: usize,
    compute: Box<Compute>,
}

/// Values that were computed again or decoded in a backward pass: more than one operation may ask for one.
#[derive(Default)]
pub(crate) struct Memos(HashMap<usize, Tensor>);

/// A key for a value among the [`Memos`].
pub(super) fn new_key() -> usize {
    static KEYS: AtomicUsize = AtomicUsize::new(0);
    KEYS.fetch_add(1, Ordering::Relaxed)
}

impl Kept {
    pub(crate) fn again(
        compute: impl Fn(&mut Memos) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        Self::Again(Arc::new(Again {
            key: new_key(),
            compute: Box::new(compute),
        }))
    }

    /// The value.
    pub(crate) fn get(&self, memos: &mut Memos) -> Result<Tensor> {
        match self {
            Self::Tensor(tensor) | Self::Argument(tensor) => Ok(tensor.clone()),
            Self::Value(value) => Ok(value.get()?.clone()),
            Self::Codes(coded) => coded.get(memos),
            Self::Again(again) => memos.of(again.key, |memos| (again.compute)(memos)),
        }
    }

    /// The key of the value among the recomputed ones, if it is recomputed: a backward pass uses it to forget the value without
    /// keeping the value.
    pub(crate) fn memo(&self) -> Option<usize> {
        match self {
            Self::Again(again) => Some(again.key),
            _ => None,
        }
    }
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

    /// Forgets a value that no operation before this one asks for.
    pub(crate) fn forget(&mut self, memo: Option<usize>) {
        if let Some(key) = memo {
            self.0.remove(&key);
        }
    }
}
