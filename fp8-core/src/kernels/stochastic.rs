//! Stochastic rounding to the 16-bit types: for each chunk random bits, then values.

use super::dispatch;
use super::general::{CHUNK, Words, random_words};
use crate::{HalfPrecision, StochasticKey};

/// `src` rounded with the words of the elements from `element` on.
pub(crate) fn round<T: HalfPrecision>(
    isa: super::Isa,
    key: StochasticKey,
    element: u64,
    src: &[f32],
    dst: &mut [T],
) {
    let mut words: Words = [0; CHUNK + 4];
    for (index, (src, dst)) in src.chunks(CHUNK).zip(dst.chunks_mut(CHUNK)).enumerate() {
        let element = element + (index * CHUNK) as u64;
        let skip = (element % 4) as usize;
        random_words(isa, key, element / 4, &mut words[..skip + src.len()]);
        chunk(isa, &words[skip..], src, dst);
    }
}

dispatch! {
    fn chunk [T: HalfPrecision] [T] (words: &[u32], src: &[f32], dst: &mut [T]) {
        for ((&value, &word), dst) in src.iter().zip(words).zip(dst) {
            *dst = T::from_f32_stochastic(value, word);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Isa;
    use half::{bf16, f16};

    #[test]
    fn random_words_are_those_of_their_elements() {
        let key = StochasticKey {
            seed: 5,
            step: 2,
            tensor: 9,
        };
        // Beyond a chunk, and within and at the ends of counters.
        for first in 0..5 {
            for len in [0, 1, 3, 4, 255, 256, 257, 600] {
                let mut words = vec![0; len];
                crate::random_words(key, first, &mut words);
                let expected = (first..).map(|element| key.word(element)).take(len);
                assert!(words.iter().copied().eq(expected), "{first} {len}");
            }
        }
    }

    #[test]
    fn every_instruction_set_is_the_definition() {
        let key = StochasticKey {
            seed: 5,
            step: 2,
            tensor: 9,
        };
        // Every exponent, with mantissas that the words decide about.
        let values: Vec<f32> = (0..=u16::MAX)
            .map(|high| f32::from_bits(u32::from(high) << 16 | (u32::from(high) * 31) & 0xFFFF))
            .collect();
        for isa in Isa::available() {
            for first in [0, 3] {
                let mut short = vec![f16::ZERO; values.len()];
                let mut wide = vec![bf16::ZERO; values.len()];
                round(isa, key, first, &values, &mut short);
                round(isa, key, first, &values, &mut wide);
                for (i, &value) in values.iter().enumerate() {
                    let word = key.word(first + i as u64);
                    let expected = f16::from_f32_stochastic(value, word).to_bits();
                    assert_eq!(short[i].to_bits(), expected, "{isa:?} {value:e}");
                    let expected = bf16::from_f32_stochastic(value, word).to_bits();
                    assert_eq!(wide[i].to_bits(), expected, "{isa:?} {value:e}");
                }
            }
        }
    }
}
