//! Values that a node keeps in FP8: E4M3 codes, with a scale for each group of neighbouring features.
//!
//! The operation that asks first triggers the cast, and every other reader of the value, or of a view of it, shares the codes. Where that
//! operation reads the value row by row, it makes the codes beside its own work. A backward pass decodes them when an operation reads the
//! value, and forgets the decoded values once the operation that asked first, and so reads last, has read them.

use super::memos::{Memos, new_key};
use crate::base::error::{Result, internal};
use crate::base::sync::lock;
use crate::cast::kept::{KeptTensor, group_codes};
use crate::cast::tensor::Fp8Tensor;
use candle_core::{DType, Tensor};
use std::sync::{Arc, Mutex, OnceLock};

/// The codes of a value and of its views, once an operation has asked for them.
pub(crate) type Place = Arc<OnceLock<Arc<Codes>>>;

/// The codes of a value.
pub(crate) struct Codes {
    pub(super) key: usize,
    /// The features of a group.
    size: usize,
    /// The value, until it has been cast.
    waiting: Mutex<Option<Tensor>>,
    made: OnceLock<Fp8Tensor>,
}

impl Codes {
    /// The codes of `x` in groups of `size` features or what is left of a row, to be made.
    pub(super) fn of(x: &Tensor, size: usize) -> Self {
        Self {
            key: new_key(),
            size,
            waiting: Mutex::new(Some(x.clone())),
            made: OnceLock::new(),
        }
    }

    /// The codes, which the first call makes unless an operation has.
    pub(crate) fn get(&self) -> Result<&Fp8Tensor> {
        let mut waiting = lock(&self.waiting);
        if let Some(x) = &*waiting {
            let codes = group_codes(x, self.size)?;
            self.made.get_or_init(|| codes);
            *waiting = None;
        }
        drop(waiting);
        match self.made.get() {
            Some(codes) => Ok(codes),
            None => internal!("a value without codes"),
        }
    }

    /// The features of a group, if the codes are still to be made.
    pub(crate) fn wanted(&self) -> Option<usize> {
        lock(&self.waiting).as_ref().map(|_| self.size)
    }

    /// Takes the codes that an operation has made.
    pub(crate) fn fill(&self, codes: Fp8Tensor) {
        self.made.get_or_init(|| codes);
        *lock(&self.waiting) = None;
    }
}

/// A value, or a view of it, in codes.
#[derive(Clone)]
pub(crate) struct Coded {
    pub(super) codes: Arc<Codes>,
    pub(super) dims: Vec<usize>,
    pub(super) dtype: DType,
}

impl Coded {
    /// The values that the codes stand for.
    pub(super) fn get(&self, memos: &mut Memos) -> Result<Tensor> {
        let decoded = memos.of(self.codes.key, |_| self.codes.get()?.dequantize(self.dtype))?;
        match decoded.dims() == self.dims {
            true => Ok(decoded),
            false => Ok(decoded.reshape(self.dims.as_slice())?),
        }
    }

    /// Whether an operation can decode a few rows of this view at a time: on the CPU, if its rows are those of the codes.
    pub(super) fn decodes_rows(&self) -> Result<bool> {
        let codes = self.codes.get()?;
        Ok(codes.device().is_cpu() && codes.dims().last() == self.dims.last())
    }

    /// The codes, for a reader that decodes them itself.
    pub(super) fn kept(&self) -> Result<KeptTensor> {
        let codes = self.codes.get()?.clone();
        Ok(KeptTensor::Codes(codes, self.dims.clone(), self.dtype))
    }
}
