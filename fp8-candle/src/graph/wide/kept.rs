//! What a node keeps of a value for its backward pass.

use super::codes::Coded;
use super::memos::{Memos, new_key};
use super::value::Value;
use crate::base::error::Result;
use candle_core::Tensor;
use std::sync::Arc;

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
