//! How values of a moment become codes.

use fp8_core::{
    EXPANDED_BLOCK, EXPANDED_WORDS, Expansion, RandomWords, StochasticKey, encode_expanded,
    random_words,
};

use super::super::rule::MAX_MOMENTS;

/// Elements of a block.
pub(crate) const BLOCK: usize = EXPANDED_BLOCK;

/// The most elements whose random words are drawn at a time.
pub(crate) const DRAWN: usize = 4 * BLOCK;

/// How values become codes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Coding {
    pub(crate) expansion: Expansion,
    pub(crate) random: Option<Random>,
}

/// The random bits of a moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Random {
    /// The same for all moments of a variable, which share its words: those of block number `i` begin at `EXPANDED_WORDS * i`.
    pub(crate) key: StochasticKey,
    /// By how many bits the words are rotated left for this moment.
    pub(crate) rotated: u32,
}

impl Random {
    /// Those of moment number `i` of the variable with this key. Rounding looks at the upper bits of a word first, and each moment of both
    /// elements that share a word has other bits there.
    pub(crate) fn of(key: StochasticKey, i: usize) -> Self {
        const APART: u32 = u32::BITS / (2 * MAX_MOMENTS) as u32;
        let rotated = i as u32 * APART;
        Self { key, rotated }
    }
}

/// The random words of some elements, drawn when they are first needed.
pub(crate) struct Draw {
    /// Number of the first element.
    first: u64,
    words: [u32; DRAWN / BLOCK * EXPANDED_WORDS],
    drawn: Option<StochasticKey>,
}

impl Draw {
    pub(crate) fn new() -> Self {
        Self {
            first: 0,
            words: [0; DRAWN / BLOCK * EXPANDED_WORDS],
            drawn: None,
        }
    }

    /// Begins with other elements.
    pub(crate) fn start(&mut self, first: u64) {
        (self.first, self.drawn) = (first, None);
    }

    /// Codes up to [`DRAWN`] values, the first of which is the one that this has been started with and begins a block.
    pub(crate) fn encode(
        &mut self,
        values: &[f32],
        coding: Coding,
        outs: (&mut [u8], &mut [f32], &mut [u8]),
    ) {
        let words = match coding.random {
            None => None,
            Some(Random { key, rotated }) => {
                let words = &mut self.words[..values.len().div_ceil(BLOCK) * EXPANDED_WORDS];
                if self.drawn != Some(key) {
                    let first = self.first / BLOCK as u64 * EXPANDED_WORDS as u64;
                    random_words(key, first, words);
                    self.drawn = Some(key);
                }
                Some(RandomWords { words, rotated })
            }
        };
        encode_expanded(values, coding.expansion, words, outs);
    }
}

/// The codes, amaxes and curves of all values of a moment.
pub(super) fn encode(
    values: &[f32],
    coding: Coding,
    (codes, amaxes, curves): (&mut [u8], &mut [f32], &mut [u8]),
) {
    let marks = amaxes
        .chunks_mut(DRAWN / BLOCK)
        .zip(curves.chunks_mut(DRAWN / BLOCK));
    let parts = values.chunks(DRAWN).zip(codes.chunks_mut(DRAWN)).zip(marks);
    let mut draw = Draw::new();
    for (part, ((values, codes), (amaxes, curves))) in parts.enumerate() {
        draw.start((part * DRAWN) as u64);
        draw.encode(values, coding, (codes, amaxes, curves));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the docs of `Fp8Moments::stochastic` say.
    #[test]
    fn moments_use_other_bits_of_one_draw() {
        let key = StochasticKey {
            seed: 3,
            step: 7,
            tensor: 5,
        };
        let len = 3 * DRAWN + 57;
        let values: Vec<f32> = (0..len).map(|i| 1. + (i % 97) as f32 / 97.).collect();
        let blocks = len.div_ceil(BLOCK);
        let mut words = vec![0; blocks * EXPANDED_WORDS];
        random_words(key, 0, &mut words);
        let coded = |i: usize| {
            let coding = Coding {
                random: Some(Random::of(key, i)),
                ..Coding::default()
            };
            let (mut codes, mut amaxes, mut curves) =
                (vec![0; len], vec![0.; blocks], vec![0; blocks]);
            encode(&values, coding, (&mut codes, &mut amaxes, &mut curves));
            codes
        };
        for i in 0..MAX_MOMENTS {
            let random = RandomWords {
                words: &words,
                rotated: 5 * i as u32,
            };
            let (mut codes, mut amaxes, mut curves) =
                (vec![0; len], vec![0.; blocks], vec![0; blocks]);
            let outs = (&mut codes[..], &mut amaxes[..], &mut curves[..]);
            encode_expanded(&values, Expansion::default(), Some(random), outs);
            assert_eq!(coded(i), codes, "{i}");
        }
        assert_ne!(coded(0), coded(1));
        assert_ne!(coded(1), coded(2));
    }
}
