//! Philox4x32-10 for the sixteen counters of a block, as `philox.rs` defines it.

use std::arch::x86_64::*;

use super::{BLOCK, Isa, LANES, VECTORS, block_of_words, is_in, to_words};
use crate::{StochasticKey, philox};

/// The words of the counters from `first` on.
pub(in super::super) fn words_of(isa: Isa, key: StochasticKey, first: u64, words: &mut [u32]) {
    assert!(is_in(isa), "{isa:?}");
    // SAFETY: as asserted, the processor has these features.
    unsafe { fill(&Generator::new(key), first, words) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn fill(generator: &Generator, first: u64, words: &mut [u32]) {
    let (whole, rest) = words.as_chunks_mut::<BLOCK>();
    let first_of = |block: usize| first.wrapping_add((block * BLOCK / 4) as u64);
    let blocks = whole.len();
    for (block, words) in whole.iter_mut().enumerate() {
        let vectors = generator.sixteen(first_of(block));
        for (to, vector) in words.as_chunks_mut::<LANES>().0.iter_mut().zip(vectors) {
            *to = to_words(vector);
        }
    }
    if !rest.is_empty() {
        let last = generator.sixteen(first_of(blocks)).map(|v| to_words(v));
        rest.copy_from_slice(&last.as_flattened()[..rest.len()]);
    }
}

/// The keys of all rounds.
#[derive(Clone, Copy, Default)]
pub(super) struct Generator {
    key: StochasticKey,
    /// As wide as the lanes they go to: a vector of one is loaded by an operation that uses it, and takes no shuffle.
    rounds: [[u64; 2]; philox::ROUNDS],
}

impl Generator {
    pub(super) fn new(key: StochasticKey) -> Self {
        let mut round_key = [key.seed as u32, (key.seed >> 32) as u32];
        let rounds = std::array::from_fn(|_| {
            let this = round_key.map(u64::from);
            for (word, step) in round_key.iter_mut().zip(philox::KEY_STEPS) {
                *word = word.wrapping_add(step);
            }
            this
        });
        Self { key, rounds }
    }

    /// The random words of the elements `element .. element + 64`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) fn block(&self, element: u64) -> [__m512i; VECTORS] {
        if element.is_multiple_of(4) {
            self.sixteen(element / 4)
        } else {
            self.unaligned(element)
        }
    }

    /// [`Generator::block`], starting within the four words of a counter.
    #[cold]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn unaligned(&self, element: u64) -> [__m512i; VECTORS] {
        let (first, skip) = (element / 4, (element % 4) as usize);
        let mut buffer = [0; 2 * BLOCK];
        let (halves, _) = buffer.as_chunks_mut::<BLOCK>();
        for (half, first) in halves.iter_mut().zip([first, first.wrapping_add(16)]) {
            half.copy_from_slice(self.sixteen(first).map(|v| to_words(v)).as_flattened());
        }
        block_of_words(&std::array::from_fn(|i| buffer[skip + i]))
    }

    /// The words of sixteen counters from `first` on.
    ///
    /// Each word of a counter takes the lower half of 64 bits of a vector, so one product gives two words of the next
    /// round; the upper halves are arbitrary. There are two sets of eight counters because one alone would wait for its
    /// products.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn sixteen(&self, first: u64) -> [__m512i; VECTORS] {
        // This order puts counters 0 to 3 into the lower halves of the 128-bit lanes.
        let offsets = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
        let splat = |word: u32| _mm512_set1_epi64(i64::from(word));
        let multipliers = philox::MULTIPLIERS.map(splat);
        let (step, tensor) = (splat(self.key.step), splat(self.key.tensor));
        let mut sets = [first, first.wrapping_add(8)].map(|first| {
            let index = _mm512_add_epi64(_mm512_set1_epi64(first as i64), offsets);
            [index, _mm512_srli_epi64::<32>(index), step, tensor]
        });
        for [k0, k1] in self.rounds {
            let keys = [k0, k1].map(|key| _mm512_set1_epi64(key as i64));
            for [c0, c1, c2, c3] in &mut sets {
                let p0 = _mm512_mul_epu32(multipliers[0], *c0);
                let p1 = _mm512_mul_epu32(multipliers[1], *c2);
                *c0 = _mm512_ternarylogic_epi64::<XOR>(upper(p1), *c1, keys[0]);
                *c2 = _mm512_ternarylogic_epi64::<XOR>(upper(p0), *c3, keys[1]);
                (*c1, *c3) = (p1, p0);
            }
        }
        let [[a, b], [c, d]] = sets.map(|[c0, c1, c2, c3]| {
            // The second word of a pair goes into the upper half.
            let low = _mm512_mask_shuffle_epi32::<0xA0>(c0, 0xAAAA, c1);
            let high = _mm512_mask_shuffle_epi32::<0xA0>(c2, 0xAAAA, c3);
            [
                _mm512_unpacklo_epi64(low, high),
                _mm512_unpackhi_epi64(low, high),
            ]
        });
        [a, b, c, d]
    }
}

/// The upper half of each 64 bits, in the lower one. A shuffle and no shift, because shifts would wait for the port of the products.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn upper(products: __m512i) -> __m512i {
    _mm512_shuffle_epi32::<0xF5>(products)
}

/// For `_mm512_ternarylogic_epi64`: the exclusive or of all three.
const XOR: i32 = 0x96;
