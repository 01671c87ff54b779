//! Keys and values outside any graph, in memory with room for more.

use crate::error::Result;
use candle_core::Tensor;
use fp8_candle::ops::{AttentionOptions, CachedTokens, cached_attention};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// New memory has room for this many tokens at least.
const FIRST: usize = 64;

/// Attention adds up keys in groups, whose sizes divide this number. Tokens are dropped in multiples of it, so that the others stay in the
/// groups that they have in one pass over the whole sequence.
const GROUP: usize = 64;

/// The tokens of a sequence, of which the first may have been dropped.
#[derive(Debug, Clone)]
pub(super) struct Room {
    /// `[batch, kv_heads, capacity, head_dim]`.
    k: Tensor,
    v: Tensor,
    /// Tokens in `k` and `v`, from the first on.
    len: usize,
    /// Tokens that caches have written which share this memory. Who has as many may write the next ones in place.
    written: Arc<AtomicUsize>,
}

impl Room {
    /// Room for tokens like these, without them.
    pub(super) fn of(k: &Tensor, v: &Tensor) -> Result<Self> {
        Self::with_capacity([k, v], FIRST.max(2 * k.dim(2)?))
    }

    fn with_capacity(like: [&Tensor; 2], capacity: usize) -> Result<Self> {
        let zeros = |x: &Tensor| {
            let mut dims = x.dims().to_vec();
            dims[2] = capacity;
            Tensor::zeros(dims, x.dtype(), x.device())
        };
        Ok(Self {
            k: zeros(like[0])?,
            v: zeros(like[1])?,
            len: 0,
            written: Arc::default(),
        })
    }

    /// Tokens that the next one sees, and those before it that a window does not hide from it.
    pub(super) fn held(&self, window: Option<usize>) -> usize {
        window.map_or(self.len, |window| window.min(self.len))
    }

    /// Keys and values of the tokens that are [held](Self::held).
    pub(super) fn tokens(&self, window: Option<usize>) -> Result<[Tensor; 2]> {
        let held = self.held(window);
        let part = |x: &Tensor| x.narrow(2, self.len - held, held)?.contiguous();
        Ok([part(&self.k)?, part(&self.v)?])
    }

    /// Causal attention of `q` over these tokens and the `new` ones; the result, and the room with them.
    pub(super) fn attention(
        self,
        q: &Tensor,
        new: [&Tensor; 2],
        mut options: AttentionOptions,
    ) -> Result<(Self, Tensor)> {
        let (held, window) = (self.held(options.window), options.window);
        let count = new[0].dim(2)?;
        let room = self.appended(new, count, window)?;
        // The CPU's kernels skip what no query sees. Elsewhere all keys are copied.
        let before = room.len - count - held;
        let skipped = match q.device().is_cpu() {
            true => 0,
            false => before,
        };
        // Lengths count from the first token held.
        for length in options.key_lengths.iter_mut().flatten() {
            *length += before - skipped;
        }
        let keys = room.len - skipped;
        let seen = |x: &Tensor| x.narrow(2, skipped, keys);
        let [k, v] = [seen(&room.k)?, seen(&room.v)?];
        let [k_tokens, v_tokens] = [&k, &v].map(CachedTokens::HighPrecision);
        let y = cached_attention(q, k_tokens, v_tokens, keys, &options)?;
        Ok((room.trimmed(window)?, y))
    }

    /// Without memory for many more tokens than a window leaves, as after a long prompt.
    fn trimmed(self, window: Option<usize>) -> Result<Self> {
        let capacity = self.k.dim(2)?;
        match window {
            Some(window) if capacity > FIRST.max(4 * (window + GROUP)) => {
                self.moved(0, Some(window))
            }
            _ => Ok(self),
        }
    }

    fn appended(mut self, new: [&Tensor; 2], count: usize, window: Option<usize>) -> Result<Self> {
        let end = self.len + count;
        let fits = end <= self.k.dim(2)?
            && (self.written)
                .compare_exchange(self.len, end, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        if !fits {
            self = self.moved(count, window)?;
        }
        for (room, new) in [&self.k, &self.v].into_iter().zip(new) {
            room.slice_set(&new.contiguous()?, 2, self.len)?;
        }
        self.len += count;
        Ok(self)
    }

    /// A copy in new memory with room for twice as many tokens, without those that a window hides from all later ones; the next `count`
    /// count as written.
    fn moved(&self, count: usize, window: Option<usize>) -> Result<Self> {
        let dropped = (self.len - self.held(window)) / GROUP * GROUP;
        let len = self.len - dropped;
        let capacity = FIRST.max(2 * (len + count));
        let room = Self::with_capacity([&self.k, &self.v], capacity)?;
        if len > 0 {
            for (to, from) in [(&room.k, &self.k), (&room.v, &self.v)] {
                to.slice_set(&from.narrow(2, dropped, len)?.contiguous()?, 2, 0)?;
            }
        }
        room.written.store(len + count, Ordering::Relaxed);
        Ok(Self { len, ..room })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};
    use fp8_candle::ops::attention;
    use fp8_test_support::{assert_same, normal};

    const TOKENS: usize = 200;

    /// What a window has dropped changes no bit of the rows that follow.
    #[test]
    fn rows_are_those_of_one_call_to_the_bit() {
        let values = |seed, heads| {
            let x = normal(seed, (2, heads, TOKENS, 16));
            x.to_device(&Device::Cpu).unwrap()
        };
        let (q, k, v) = (values(1, 4), values(2, 2), values(3, 2));
        for operands in [None, Some(DType::BF16)] {
            for window in [None, Some(1), Some(5), Some(33), Some(64), Some(100)] {
                let options = AttentionOptions::default()
                    .with_causal(true)
                    .with_window(window)
                    .with_operands(operands);
                let want = attention(&q, &k, &v, options.clone()).unwrap();
                for chunks in [vec![1; TOKENS], vec![7, 1, 60, 60, 1, 71]] {
                    let one = |x: &Tensor| x.narrow(2, 0, 1).unwrap();
                    let (mut room, mut start) = (Room::of(&one(&k), &one(&v)).unwrap(), 0);
                    for len in chunks {
                        let part = |x: &Tensor| x.narrow(2, start, len).unwrap();
                        let new = [&part(&k), &part(&v)];
                        let (next, got) =
                            (room.attention(&part(&q), new, options.clone())).unwrap();
                        let case = format!("{operands:?}, window {window:?}, from {start}");
                        assert_same(&case, &got, &part(&want));
                        (room, start) = (next, start + len);
                    }
                }
            }
        }
    }

    /// Neither a long prompt nor many tokens leave memory for more than some windows.
    #[test]
    fn a_window_bounds_the_memory() {
        let values = |tokens| Tensor::zeros((1, 1, tokens, 8), DType::F32, &Device::Cpu).unwrap();
        let options = AttentionOptions::default().with_window(10);
        let mut room = Room::of(&values(5000), &values(5000)).unwrap();
        for tokens in [5000, 1, 3, 700, 1] {
            let x = values(tokens);
            (room, _) = room.attention(&x, [&x, &x], options.clone()).unwrap();
            assert!(room.k.dim(2).unwrap() <= 4 * (10 + GROUP));
            assert_eq!(room.held(Some(10)), 10);
        }
    }
}
