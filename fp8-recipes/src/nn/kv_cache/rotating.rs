//! A cache that keeps the newest positions.

use super::{check_values, traced_cache};
use candle_core::{Device, Result, Tensor};

traced_cache!(RotatingCache, RotatingKvCache);

impl RotatingCache {
    /// Appends `src`. Returns the buffer, or `src` if it is longer than the buffer.
    ///
    /// # Errors
    /// If its shape does not fit the cache.
    pub fn append(&mut self, src: &Tensor) -> Result<Tensor> {
        if self.traced.is_none() && !src.track_op() {
            return self.inner.append(src);
        }
        let traced = self.written(src)?;
        let whole = src.dim(self.dim())? >= self.max_seq_len();
        self.inner.append(&src.detach())?;
        self.traced = Some(traced.clone());
        Ok(if whole { src.clone() } else { traced })
    }

    /// The buffer after `src` is written at the current offset.
    fn written(&self, src: &Tensor) -> Result<Tensor> {
        let (dim, size, at) = (self.dim(), self.max_seq_len(), self.offset());
        let len = src.dim(dim)?;
        if len >= size {
            return src.narrow(dim, len - size, size);
        }
        let before = self.current_data()?;
        let held = before.as_ref().map_or(Ok(0), |before| before.dim(dim))?;
        let before = before.as_ref().unwrap_or(src);
        let to_end = size - at;
        let parts = match len <= to_end {
            true => [(before, 0, at), (src, 0, len), (before, at + len, held)],
            // The end of `src` wraps around to the start of the buffer.
            false => [
                (src, to_end, len),
                (before, len - to_end, at),
                (src, 0, to_end),
            ],
        };
        let parts = parts.into_iter().filter(|(_, from, to)| from < to);
        let parts = parts.map(|(tensor, from, to)| tensor.narrow(dim, from, to - from));
        Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, dim)
    }
}

impl RotatingKvCache {
    /// Appends keys and values. Returns those that attention reads.
    ///
    /// # Errors
    /// If a shape or dtype does not fit the cache. Neither keys nor values are appended then.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        check_values(self.v.all_data(), (k, v), self.v.dim())?;
        Ok((self.k.append(k)?, self.v.append(v)?))
    }

    /// Where the next position is written.
    pub fn offset(&self) -> usize {
        self.k.offset()
    }

    /// The mask to apply after `seq_len` positions were appended.
    ///
    /// # Errors
    /// If a tensor operation fails.
    pub fn attn_mask(&self, seq_len: usize, device: &Device) -> Result<Option<Tensor>> {
        self.k.attn_mask(seq_len, device)
    }

    /// The positions of all elements after `seq_len` were appended.
    pub fn positions(&self, seq_len: usize) -> Vec<usize> {
        self.k.positions(seq_len)
    }
}
