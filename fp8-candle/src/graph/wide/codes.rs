//! Values that a node keeps in FP8: E4M3 codes, with a scale for each group of neighbouring features.
//!
//! The operation that asks first has the codes made, and every other reader of the value, or of a view of it, shares them. A
//! backward pass decodes them when an operation reads the value, and forgets the decoded values once the operation that asked
//! first, and so reads last, has read them.

use super::memos::Memos;
use crate::base::error::Result;
use crate::cast::quantizer::Quantizer;
use crate::cast::tensor::Fp8Tensor;
use candle_core::{DType, Tensor};
use fp8_core::{Contraction, Format, Granularity};
use std::sync::{Arc, OnceLock};

/// The codes of a value and of its views, once an operation has asked for them.
pub(crate) type Place = Arc<OnceLock<Arc<Codes>>>;

pub(crate) struct Codes {
    pub(super) key: usize,
    pub(super) codes: Fp8Tensor,
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
        let Codes { key, codes } = &*self.codes;
        let decoded = memos.of(*key, |_| codes.dequantize(self.dtype))?;
        match decoded.dims() == self.dims {
            true => Ok(decoded),
            false => Ok(decoded.reshape(self.dims.as_slice())?),
        }
    }
}

/// The codes of `x`, whose groups are `size` features or what is left of a row.
pub(crate) fn encode(x: &Tensor, size: usize) -> Result<Fp8Tensor> {
    let granularity = Granularity::Blockwise {
        rows: 1,
        cols: size,
    };
    let cast = Quantizer::dynamic(Format::E4M3, granularity);
    Ok(cast.quantize(x, Contraction::Cols)?.tensor)
}
