//! Token ids as models take them.

use crate::models::error::{Error, Result};
use candle_core::{DType, Tensor};

/// Checks that `ids` is `[batch, tokens]` of integers below `vocab_size`, and converts it to u32.
pub(crate) fn token_rows(ids: &Tensor, vocab_size: usize) -> Result<Tensor> {
    let wrong = |reason| Err(Error::TokenIds { reason });
    let (dims, dtype) = (ids.dims(), ids.dtype());
    if dims.len() != 2 {
        return wrong(format!("their shape is {dims:?}, expected [batch, tokens]"));
    }
    if !dtype.is_int() {
        return wrong(format!("they are {}, expected integers", dtype.as_str()));
    }
    let mut values = ids
        .to_dtype(DType::I64)?
        .flatten_all()?
        .to_vec1::<i64>()?
        .into_iter();
    if let Some(id) = values.find(|id| !(0..vocab_size as i64).contains(id)) {
        return wrong(format!("{id} is not in the vocabulary of {vocab_size}"));
    }
    Ok(ids.to_dtype(DType::U32)?)
}
