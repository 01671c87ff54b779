//! What a node keeps of a value for its backward pass.

use super::value::Value;
use crate::base::error::Result;
use candle_core::Tensor;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A value that the backward pass can have again, to the bit.
#[derive(Clone)]
pub(crate) enum Kept {
    Tensor(Tensor),
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

/// Values that were computed again in a backward pass: more than one operation may ask for one.
#[derive(Default)]
pub(crate) struct Memos(HashMap<usize, Tensor>);

impl Kept {
    pub(crate) fn again(
        compute: impl Fn(&mut Memos) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        static KEYS: AtomicUsize = AtomicUsize::new(0);
        Self::Again(Arc::new(Again {
            key: KEYS.fetch_add(1, Ordering::Relaxed),
            compute: Box::new(compute),
        }))
    }

    /// The value.
    pub(crate) fn get(&self, memos: &mut Memos) -> Result<Tensor> {
        match self {
            Self::Tensor(tensor) => Ok(tensor.clone()),
            Self::Value(value) => Ok(value.get()?.clone()),
            Self::Again(again) => {
                if let Some(tensor) = memos.0.get(&again.key) {
                    return Ok(tensor.clone());
                }
                let tensor = (again.compute)(memos)?;
                memos.0.insert(again.key, tensor.clone());
                Ok(tensor)
            }
        }
    }

    /// The key of the value among the recomputed ones, if it is recomputed: a backward pass uses it to forget the value without
    /// keeping the value.
    pub(crate) fn memo(&self) -> Option<usize> {
        match self {
            Self::Tensor(_) | Self::Value(_) => None,
            Self::Again(again) => Some(again.key),
        }
    }
}

impl Memos {
    /// Forgets a value that no operation before this one asks for.
    pub(crate) fn forget(&mut self, memo: Option<usize>) {
        if let Some(key) = memo {
            self.0.remove(&key);
        }
    }
}
