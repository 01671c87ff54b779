//! How values of a moment become codes.

use fp8_core::{
    EXPANDED_BLOCK, Expansion, RandomWords, StochasticKey, encode_expanded, random_words,
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
    /// The same for all moments of a variable, which share its words.
    pub(crate) key: StochasticKey,
    /// By how many bits the words are rotated left for this moment.
    pub(crate) rotated: u32,
}

impl Random {
    /// Those of moment number `i` of the variable with this key. Rounding looks at the upper bits of a word first, and each moment has other
    /// bits there.
    pub(crate) fn of(key: StochasticKey, i: usize) -> Self {
        const APART: u32 = u32::BITS / MAX_MOMENTS as u32;
        let rotated = i as u32 * APART;
        Self { key, rotated }
    }
}

/// The random words of some elements, drawn when they are first needed.
pub(crate) struct Draw {
    /// Number of the first element.
    first: u64,
    words: [u32; DRAWN],
    drawn: Option<StochasticKey>,
}

impl Draw {
    pub(crate) fn new() -> Self {
        Self {
            first: 0,
            words: [0; DRAWN],
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
                let words = &mut self.words[..values.len()];
                if self.drawn != Some(key) {
                    random_words(key, self.first, words);
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
