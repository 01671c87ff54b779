//! What the backward passes of operations read of their arguments: the values themselves, or codes of them.

use super::codes::{Coded, Codes, encode};
use super::kept::Kept;
use super::memos::{Memos, new_key};
use super::{Wide, WideNode};
use crate::base::error::Result;
use crate::cast::tensor::Fp8Tensor;
use candle_core::{DType, Tensor};
use std::sync::Arc;

/// What the backward pass of an operation reads of one of its arguments.
#[derive(Clone)]
pub(crate) struct Reader {
    kept: Kept,
    /// What no operation reads after this one has.
    last: Option<usize>,
}

impl Reader {
    /// Reads `x` as it is.
    pub(crate) fn of(x: &Wide) -> Self {
        Self {
            kept: x.kept.clone(),
            last: None,
        }
    }

    /// The value, which other operations may still read.
    pub(crate) fn get(&self, memos: &mut Memos) -> Result<Tensor> {
        self.kept.get(memos)
    }

    /// The value, when the operation itself reads it for the last time.
    pub(crate) fn finish(&self, memos: &mut Memos) -> Result<Tensor> {
        let value = self.kept.get(memos)?;
        self.done(memos);
        Ok(value)
    }

    /// Forgets the value if the operation, which has read it, was the last to do so.
    pub(crate) fn done(&self, memos: &mut Memos) {
        memos.forget(self.last);
    }

    fn is_again(&self) -> bool {
        matches!(self.kept, Kept::Again(_))
    }

    fn is_codes(&self) -> bool {
        matches!(self.kept, Kept::Codes(_))
    }
}

/// What the backward pass of attention reads.
pub(crate) enum Heads {
    Exact([Tensor; 3]),
    /// Codes and sizes of q, k and v, and their dtype.
    Codes(Box<[(Fp8Tensor, Vec<usize>); 3]>, DType),
}

impl Heads {
    pub(crate) fn rounds(&self) -> bool {
        matches!(self, Self::Codes(..))
    }

    pub(crate) fn get(&self) -> Result<[Tensor; 3]> {
        match self {
            Self::Exact(qkv) => Ok(qkv.clone()),
            Self::Codes(codes, dtype) => {
                let value = |(codes, dims): &(Fp8Tensor, Vec<usize>)| -> Result<Tensor> {
                    Ok(codes.dequantize(*dtype)?.reshape(dims.as_slice())?)
                };
                let [q, k, v] = &**codes;
                Ok([value(q)?, value(k)?, value(v)?])
            }
        }
    }
}

impl WideNode {
    /// What the backward pass reads in place of `x`.
    pub(crate) fn keep(&mut self, x: &Wide) -> Result<Reader> {
        let size = match (self.groups, &x.kept) {
            (Some(size), Kept::Tensor(_) | Kept::Value(_)) => size,
            _ => return Ok(Reader::of(x)),
        };
        let value = x.value.get()?;
        let (codes, is_first) = match x.codes.get() {
            Some(codes) => (codes.clone(), false),
            None => {
                let made = Arc::new(Codes {
                    key: new_key(),
                    codes: encode(value, size)?,
                });
                self.note_codes(&made.codes);
                (x.codes.get_or_init(|| made).clone(), true)
            }
        };
        let last = is_first.then_some(codes.key);
        let coded = Coded {
            codes,
            dims: value.dims().to_vec(),
            dtype: value.dtype(),
        };
        Ok(Reader {
            kept: Kept::Codes(coded),
            last,
        })
    }

    /// Whether an elementwise function of `inputs` is computed again rather than kept: where they are, and where codes of them are kept.
    pub(crate) fn computes_again(&self, inputs: &[&Reader]) -> bool {
        let from_again = self.recomputes && inputs.iter().all(|input| input.is_again());
        let from_codes = inputs
            .iter()
            .all(|input| input.is_again() || input.is_codes());
        from_again || self.groups.is_some() && from_codes
    }

    /// What the backward pass of attention reads of q, k and v, `[b, t, h, d]`, if it `is_tracked`: groups run along the features of all
    /// heads.
    pub(crate) fn keep_heads(&mut self, qkv: [Tensor; 3], is_tracked: bool) -> Result<Heads> {
        let Some(size) = self.groups.filter(|_| is_tracked) else {
            return Ok(Heads::Exact(qkv));
        };
        let dtype = qkv[0].dtype();
        let [q, k, v] = qkv.map(|x| -> Result<_> {
            let (b, t, h, d) = x.dims4()?;
            let codes = encode(&x.contiguous()?.reshape((b, t, h * d))?, size)?;
            Ok((codes, vec![b, t, h, d]))
        });
        let codes = [q?, k?, v?];
        codes.iter().for_each(|(codes, _)| self.note_codes(codes));
        Ok(Heads::Codes(Box::new(codes), dtype))
    }

    fn note_codes(&mut self, codes: &Fp8Tensor) {
        self.bytes_in_fp8 += codes.size_in_bytes();
    }
}
