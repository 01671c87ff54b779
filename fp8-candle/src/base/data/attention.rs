//! The sizes of one call of attention, which keys each query sees, and which probabilities are dropped.

use candle_core::{DType, Tensor};
use fp8_core::Format;
use std::ops::Range;
use std::sync::Arc;

/// The sizes of one call, checked by `ops::attention`.
#[derive(Debug, Clone)]
pub(crate) struct Attention {
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    pub(crate) head_dim: usize,
    pub(crate) causal: bool,
    /// The most keys that a query sees; implies `causal`.
    pub(crate) window: Option<usize>,
    /// Keys that exist in each batch entry, at most `keys`.
    pub(crate) key_lengths: Option<Arc<[usize]>>,
    pub(crate) softmax_scale: f64,
    pub(crate) dropout: Option<Dropout>,
    /// The dtype to which the operands of products are rounded; `None` for that of the tensors.
    pub(crate) operands: Option<DType>,
    /// Whether the dimensions are batch, token, head, feature instead of batch, head, token, feature.
    pub(crate) tokens_first: bool,
    /// Whether the backward pass reads other q and k than the forward pass did, rounded ones: then it computes the sums of exponentials
    /// again, so that probabilities add up to 1.
    pub(crate) normalizes: bool,
}

impl Attention {
    /// Pairs of a batch entry and a head.
    #[cfg(feature = "cuda")]
    pub(crate) fn pairs(&self) -> usize {
        self.batch * self.heads
    }

    /// Whether the operands of products are rounded to bf16, for tensors of `dtype`.
    pub(crate) fn in_bf16(&self, dtype: DType) -> bool {
        self.operands.unwrap_or(dtype) == DType::BF16
    }

    /// The keys that a query sees. Neither end decreases from one query to the next.
    #[inline]
    pub(crate) fn visible(&self, batch: usize, query: usize) -> Range<usize> {
        let length = self.key_lengths.as_ref().map_or(self.keys, |l| l[batch]);
        if !self.causal {
            return 0..length;
        }
        let own = query + self.keys - self.queries + 1;
        let end = own.min(length);
        let start = self.window.map_or(0, |window| own.saturating_sub(window));
        start.min(end)..end
    }

    /// The shapes of q and of k and v.
    pub(crate) fn shapes(&self) -> [[usize; 4]; 2] {
        let of = |heads, tokens| match self.tokens_first {
            true => [self.batch, tokens, heads, self.head_dim],
            false => [self.batch, heads, tokens, self.head_dim],
        };
        [of(self.heads, self.queries), of(self.kv_heads, self.keys)]
    }
}

/// The keys or the values of a cache, `[batch, kv_heads, capacity, head_dim]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CacheSide<'a> {
    /// Values, or codes as U8.
    pub(crate) tensor: &'a Tensor,
    /// The format of codes, and the dequant_scale of each head.
    pub(crate) fp8: Option<(Format, &'a [f32])>,
}

/// Dropout of probabilities: which become 0, and the factor on the others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Dropout {
    /// A probability is kept if its random word is at least this.
    least: u32,
    seed: u64,
    /// `1 / (1 - probability)`.
    pub(crate) factor: f32,
}

/// Counters drawn at a time; each gives four words.
const LANES: usize = 16;

impl Dropout {
    /// `probability` is at least 0 and below 1.
    pub(crate) fn new(probability: f64, seed: u64) -> Self {
        Self {
            least: (probability * 2f64.powi(32)) as u32,
            seed,
            factor: (1.0 / (1.0 - probability)) as f32,
        }
    }

    /// The factors on the probabilities of one query for consecutive keys. `pair` is batch entry * heads + head. They depend
    /// on these indices and the seed alone.
    #[inline(always)]
    pub(crate) fn factors(&self, pair: usize, query: usize, first_key: usize, factors: &mut [f32]) {
        const BLOCK: usize = 4 * LANES;
        let (seed, pair) = (self.seed, pair as u64);
        let key = [seed as u32, (seed >> 32) as u32];
        let mut done = 0;
        while done < factors.len() {
            let at = first_key + done;
            let (block, skip) = (at / BLOCK, at % BLOCK);
            let counters = [
                std::array::from_fn(|lane| (block * LANES + lane) as u32),
                [query as u32; LANES],
                [pair as u32; LANES],
                [(pair >> 32) as u32; LANES],
            ];
            let words = philox_lanes(counters, key);
            let mut kept = [0f32; BLOCK];
            for (word, words) in words.iter().enumerate() {
                for (lane, &random) in words.iter().enumerate() {
                    let keep = random >= self.least;
                    kept[4 * lane + word] = if keep { self.factor } else { 0.0 };
                }
            }
            let count = (BLOCK - skip).min(factors.len() - done);
            factors[done..done + count].copy_from_slice(&kept[skip..skip + count]);
            done += count;
        }
    }
}

/// `fp8_core::philox4x32_10` of several counters, in loops that LLVM vectorizes.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "four arrays at one index")]
fn philox_lanes(mut c: [[u32; LANES]; 4], mut key: [u32; 2]) -> [[u32; LANES]; 4] {
    const MULTIPLIERS: [u64; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    for _ in 0..10 {
        for lane in 0..LANES {
            let p0 = MULTIPLIERS[0] * u64::from(c[0][lane]);
            let p1 = MULTIPLIERS[1] * u64::from(c[2][lane]);
            c[0][lane] = (p1 >> 32) as u32 ^ c[1][lane] ^ key[0];
            c[1][lane] = p1 as u32;
            c[2][lane] = (p0 >> 32) as u32 ^ c[3][lane] ^ key[1];
            c[3][lane] = p0 as u32;
        }
        key = [key[0].wrapping_add(STEPS[0]), key[1].wrapping_add(STEPS[1])];
    }
    c
}

#[cfg(test)]
mod tests {
    use super::*;
    use fp8_core::philox4x32_10;

    #[test]
    fn factors_are_those_of_the_generator() {
        let dropout = Dropout::new(0.3, 0x1234_5678_9abc);
        for first in [0, 1, 63, 64, 130] {
            for len in [0, 1, 64, 201] {
                let mut factors = vec![9f32; len];
                dropout.factors(7, 11, first, &mut factors);
                for (i, &factor) in factors.iter().enumerate() {
                    let key = first + i;
                    let seed = [0x5678_9abc, 0x1234];
                    let word = philox4x32_10([(key / 4) as u32, 11, 7, 0], seed)[key % 4];
                    let expected = if f64::from(word) >= (0.3 * 2f64.powi(32)).floor() {
                        (1.0 / 0.7) as f32
                    } else {
                        0.0
                    };
                    assert_eq!(factor, expected, "{first} {i}");
                }
            }
        }
    }
}
