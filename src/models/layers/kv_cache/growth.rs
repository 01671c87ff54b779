//! Grows the memory with the tokens, and lends some rows of a batch as a separate cache.

use super::{KvCache, KvSizes, Rows};
use crate::models::error::{Error, Result};
use candle_core::Tensor;

impl KvCache {
    /// Makes room for `tokens` more of `batch` sequences.
    pub(crate) fn make_room(&mut self, batch: usize, tokens: usize, layers: usize) -> Result<()> {
        for (what, got, expected) in [
            ("a model of layers:", self.layers.len(), layers),
            ("a batch of", self.sizes.batch, batch),
        ] {
            if got != expected {
                let (got, expected) = (got.to_string(), expected.to_string());
                return Err(Error::CacheMismatch {
                    what,
                    got,
                    expected,
                });
            }
        }
        let len = self.len();
        if tokens > self.sizes.capacity - len {
            return Err(Error::CacheFull {
                len,
                tokens,
                capacity: self.sizes.capacity,
            });
        }
        self.reserve(len + tokens)
    }

    /// Tokens that memory is allocated for.
    fn allocated(&self) -> usize {
        let dims = self.layers.first().map(|layer| layer.k.stored.dims());
        dims.map_or(self.sizes.capacity, |dims| dims[2])
    }

    /// Allocates memory for at least `len` tokens.
    pub(crate) fn reserve(&mut self, len: usize) -> Result<()> {
        let allocated = self.allocated();
        if len <= allocated {
            return Ok(());
        }
        let capacity = len.max(2 * allocated).min(self.sizes.capacity);
        let sizes = KvSizes {
            capacity,
            ..self.sizes
        };
        if let Some(layer) = self.layers.first() {
            sizes.check_memory(self.layers.len(), layer.k.stored.dtype())?;
        }
        // A layer is freed before the next one grows.
        for layer in &mut self.layers {
            for side in [&mut layer.k.stored, &mut layer.v.stored] {
                let mut dims = side.dims().to_vec();
                dims[2] = capacity;
                let wide = Tensor::zeros(dims, side.dtype(), side.device())?;
                wide.slice_set(side, 2, 0)?;
                *side = wide;
            }
        }
        Ok(())
    }

    /// Groups neighbouring rows that have seen the same number of tokens.
    pub(crate) fn rows(&self) -> Vec<Rows> {
        if self.seen.is_empty() {
            return vec![Rows::default()];
        }
        let mut start = 0;
        let groups = self.seen.chunk_by(|a, b| a == b).map(|group| {
            let (count, seen) = (group.len(), group[0]);
            start += count;
            Rows {
                start: start - count,
                count,
                seen,
            }
        });
        groups.collect()
    }

    /// A cache of `count` rows from `start` that shares this one's memory. It must not outgrow the memory allocated here;
    /// [`KvCache::take_seen`] copies its counts of seen tokens back.
    pub(crate) fn part(&self, start: usize, count: usize) -> Result<Self> {
        let layers = self.layers.iter().map(|layer| layer.part(start, count));
        Ok(Self {
            layers: layers.collect::<Result<_>>()?,
            sizes: KvSizes {
                batch: count,
                capacity: self.allocated(),
                ..self.sizes
            },
            seen: self.seen[start..start + count].to_vec(),
            prompt: self.prompt,
        })
    }

    /// Copies the counts of seen tokens of `part`, whose first row is `start` here.
    pub(crate) fn take_seen(&mut self, start: usize, part: &Self) {
        self.seen[start..start + part.seen.len()].copy_from_slice(&part.seen);
    }
}
