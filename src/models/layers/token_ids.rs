//! Token ids as models take them.

use crate::models::error::{Error, Result};
use candle_core::{DType, Tensor};

/// Checks that `ids` is `[batch, tokens]` of integers below `vocab_size`, and converts it to u32.
pub(crate) fn token_rows(ids: &Tensor, vocab_size: usize) -> Result<Tensor> {
    let wrong = |reason: String| Error::TokenIds { reason };
    if ids.rank() != 2 {
        let reason = format!("their shape is {:?}, expected [batch, tokens]", ids.dims());
        return Err(wrong(reason));
    }
    if !ids.dtype().is_int() {
        let reason = format!("they are {}, expected integers", ids.dtype().as_str());
        return Err(wrong(reason));
    }
    let values = ids.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>()?;
    if let Some(id) = values
        .iter()
        .find(|id| !(0..vocab_size as i64).contains(id))
    {
        let reason = format!("{id} is not in the vocabulary of {vocab_size}");
        return Err(wrong(reason));
    }
    Ok(ids.to_dtype(DType::U32)?)
}
