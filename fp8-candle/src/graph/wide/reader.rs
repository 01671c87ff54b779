//! What the backward passes of operations read of their arguments: the values themselves, or codes of them.

use super::codes::{Coded, Codes};
use super::kept::Kept;
use super::memos::Memos;
use super::{Wide, WideNode};
use crate::base::error::Result;
use crate::cast::kept::{KeptTensor, bytes_of_groups, group_codes};
use candle_core::Tensor;
use std::sync::Arc;

/// What the backward pass of an operation reads of one of its arguments.
#[derive(Clone)]
pub(crate) struct Reader {
    kept: Kept,
    /// The value that no operation reads after this one.
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

    /// [`Reader::finish`] by an operation that can decode codes itself: they come as they are, unless they have been decoded for
    /// another reader or one will follow.
    pub(crate) fn finish_kept(&self, memos: &mut Memos) -> Result<KeptTensor> {
        match (&self.kept, self.last) {
            (Kept::Codes(coded), Some(key)) if !memos.holds(key) && coded.decodes_rows()? => {
                coded.kept()
            }
            _ => Ok(KeptTensor::Exact(self.finish(memos)?)),
        }
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

impl WideNode {
    /// What the backward pass reads in place of `x`.
    pub(crate) fn keep(&mut self, x: &Wide) -> Result<Reader> {
        let (reader, codes) = self.keep_beside(x)?;
        if let Some(codes) = codes {
            codes.get()?;
        }
        Ok(reader)
    }

    /// What the backward pass of an operation reads of `x`, if `is_read`. If the operation `casts_rows` and asks first, also the codes that
    /// it may make beside that.
    pub(crate) fn keep_for(
        &mut self,
        x: &Wide,
        is_read: bool,
        casts_rows: bool,
    ) -> Result<(Reader, Option<Arc<Codes>>)> {
        match (is_read, casts_rows) {
            (true, true) => self.keep_beside(x),
            (true, false) => Ok((self.keep(x)?, None)),
            (false, _) => Ok((Reader::of(x), None)),
        }
    }

    /// [`WideNode::keep`] with codes that are still to be made, if no operation has asked before.
    fn keep_beside(&mut self, x: &Wide) -> Result<(Reader, Option<Arc<Codes>>)> {
        let size = match (self.groups, &x.kept) {
            (Some(size), Kept::Tensor(_) | Kept::Value(_)) => size,
            _ => return Ok((Reader::of(x), None)),
        };
        let value = x.value.get()?;
        let made = Arc::new(Codes::of(value, size));
        let codes = x.codes.get_or_init(|| made.clone()).clone();
        let first = Arc::ptr_eq(&codes, &made).then_some(made);
        if let Some(codes) = &first {
            self.bytes_in_fp8 += bytes_of_groups(value.dims(), size);
            self.coded.push(codes.clone());
        }
        let last = first.as_ref().map(|codes| codes.key);
        let kept = Kept::Codes(Coded {
            codes,
            dims: value.dims().to_vec(),
            dtype: value.dtype(),
        });
        Ok((Reader { kept, last }, first))
    }

    /// Whether an elementwise function of `inputs` is computed again rather than kept: where they are, and where codes of them are kept.
    pub(crate) fn computes_again(&self, inputs: &[&Reader]) -> bool {
        let from_again = self.recomputes && inputs.iter().all(|input| input.is_again());
        let from_codes = inputs
            .iter()
            .all(|input| input.is_again() || input.is_codes());
        from_again || self.groups.is_some() && from_codes
    }

    /// What the backward pass of attention reads of q, k or v, `[b, t, h, d]`, if it `is_tracked`: groups run along the features of all
    /// heads.
    pub(crate) fn keep_head(&mut self, x: Tensor, is_tracked: bool) -> Result<KeptTensor> {
        let Some(size) = self.groups.filter(|_| is_tracked) else {
            return Ok(KeptTensor::Exact(x));
        };
        let (b, t, h, d) = x.dims4()?;
        let tokens = [b, t, h * d];
        let codes = group_codes(&x.contiguous()?.reshape(&tokens[..])?, size)?;
        self.bytes_in_fp8 += bytes_of_groups(&tokens, size);
        Ok(KeptTensor::Codes(codes, vec![b, t, h, d], x.dtype()))
    }
}
