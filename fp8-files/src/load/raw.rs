//! Tensors in dtypes that candle cannot hold, such as the masks of BOOL in GPT-2's files: their bytes.

use super::Checkpoint;
use super::catalogue::Value;
use super::family::Order;
use crate::check::is_float;
use crate::error::Result;
use candle_core::DType;
use safetensors::Dtype;
use std::ops::Range;

impl Checkpoint {
    /// The dtype of a tensor that is neither FP8 nor a scale and that candle cannot hold or convert; None for any other.
    pub(crate) fn raw_dtype(&self, name: &str) -> Option<Dtype> {
        let Some(Value::Tensor(stored)) = self.catalogue.values.get(name) else {
            return None;
        };
        let dtype = self.files.dtype(stored)?;
        let is_number = |dtype: DType| is_float(dtype) || dtype.is_int();
        let has_values = DType::try_from(dtype).is_ok_and(is_number);
        // Bytes cannot be put into another order of rows.
        (!has_values && stored.order == Order::AsStored).then_some(dtype)
    }

    /// Some of the bytes of a tensor that has a [`Checkpoint::raw_dtype`], by their positions in it.
    pub(crate) fn raw_bytes(&self, name: &str, bytes: Range<usize>) -> Result<Vec<u8>> {
        match self.catalogue.values.get(name) {
            Some(Value::Tensor(stored)) => self.files.file(stored).bytes_in(&stored.name, bytes),
            _ => Err(self.missing(name)),
        }
    }
}
