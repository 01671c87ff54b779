//! E4M3 codes in blocks that each lie on a curve: the dynamic range expansion of COAT
//! ([arXiv:2410.19313](https://arxiv.org/abs/2410.19313)), with four curves whose powers and roots need no logarithm.

use std::sync::LazyLock;

use crate::cast::{Mode, Rounder};
use crate::{Cast, Format};

/// Elements of a block of [`encode_expanded`](crate::encode_expanded); the last one may have fewer.
pub const EXPANDED_BLOCK: usize = 128;

/// Random words of a block of [`encode_expanded`](crate::encode_expanded): two elements share one.
pub const EXPANDED_WORDS: usize = EXPANDED_BLOCK / 2;

/// How many curves there are: they are numbered from 0.
pub const EXPANDED_CURVES: u8 = 4;

/// The largest number of E4M3.
pub(crate) const LARGEST: f32 = 448.;

/// What [`encode_expanded`](crate::encode_expanded) does with blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expansion {
    /// Whether blocks choose a curve; otherwise every block is on the straight one, number 0.
    pub expands: bool,
    /// Whether no value is negative. Then no code has a sign, and values above 0 stay above 0: one that is too small gets the smallest
    /// positive code.
    pub non_negative: bool,
}

/// The random words of elements, for stochastic rounding.
#[derive(Clone, Copy, Debug)]
pub struct RandomWords<'a> {
    /// [`EXPANDED_WORDS`] for each block, see [`random_words`](crate::random_words).
    pub words: &'a [u32],
    /// By how many bits each word is rotated left before its upper 20 bits are used: for elements in the second half of their block, by 16
    /// more. Rounding looks at the highest bits first, so one word serves two elements, and one draw several tensors.
    pub rotated: u32,
}

impl RandomWords<'_> {
    /// The codes of the elements `y` of one half of the first block, by their words. The loop has no branches, so that it vectorizes.
    #[inline(always)]
    fn round_half(&self, half: usize, y: &[f32; EXPANDED_WORDS], codes: &mut [u8; EXPANDED_WORDS]) {
        let rotated = self.rotated + HALF_ROTATED * half as u32;
        let words = &self.words.as_chunks::<EXPANDED_WORDS>().0[0];
        for ((code, y), word) in codes.iter_mut().zip(y).zip(words) {
            let sign = (y.to_bits() >> 24) as u8 & 0x80;
            let random = word.rotate_left(rotated) >> (u32::BITS - RANDOM_BITS);
            *code = sign | round_up_at_random(y.abs(), random);
        }
    }
}

/// How many bits of a random word an element's rounding uses.
pub(crate) const RANDOM_BITS: u32 = 20;

/// By how many bits more words are rotated for the second half of a block.
pub(crate) const HALF_ROTATED: u32 = 16;

/// The codes, amaxes and curves of blocks.
pub(crate) type Outs<'a> = (&'a mut [u8], &'a mut [f32], &'a mut [u8]);

/// Exponents `k` of `448 (|x| / amax)^k`, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Curve {
    Linear = 0,
    Square = 1,
    Fourth = 2,
    Root = 3,
}

impl Curve {
    pub(crate) fn of(number: u8) -> Self {
        match number {
            1 => Self::Square,
            2 => Self::Fourth,
            3 => Self::Root,
            _ => Self::Linear,
        }
    }

    /// The curve of a block by `spread`, its amax over its mean magnitude. Magnitudes of a sixteenth of the mean still get codes of full
    /// precision (E4M3 has them over a range of 2^14.8) up to the spread at which a smaller exponent takes over.
    pub(crate) fn for_spread(spread: f32) -> Self {
        match spread {
            s if s <= 1.25 => Self::Fourth,
            s if s <= 10. => Self::Square,
            s if s <= 48. => Self::Linear,
            _ => Self::Root,
        }
    }

    /// `t^k` for `t` in `[0, 1]`.
    #[inline(always)]
    fn raise(self, t: f32) -> f32 {
        match self {
            Self::Linear => t,
            Self::Square => t * t,
            Self::Fourth => (t * t) * (t * t),
            Self::Root => t.sqrt(),
        }
    }

    /// The inverse of [`Curve::raise`].
    fn lower(self, t: f32) -> f32 {
        match self {
            Self::Linear => t,
            Self::Square => t.sqrt(),
            Self::Fourth => t.sqrt().sqrt(),
            Self::Root => t * t,
        }
    }

    /// The shares of the amax that codes stand for.
    pub(crate) fn shares(self) -> &'static Shares {
        static SHARES: LazyLock<[Shares; EXPANDED_CURVES as usize]> =
            LazyLock::new(|| std::array::from_fn(|curve| Shares::of(Curve::of(curve as u8))));
        &SHARES[self as usize]
    }
}

/// The shares of the amax that codes stand for, with their signs.
pub(crate) struct Shares {
    pub(crate) values: [f32; 256],
    /// For each byte of an f32, from the lowest: that byte of the shares of codes without a sign.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "lookups of bytes exist on x86-64")
    )]
    pub(crate) bytes: [[u8; 128]; 4],
}

impl Shares {
    fn of(curve: Curve) -> Self {
        let values: [f32; 256] = std::array::from_fn(|code| {
            let x = Format::E4M3.decode(code as u8);
            curve.lower(x.abs() / LARGEST).copysign(x)
        });
        let of_byte = |byte: usize| std::array::from_fn(|code| values[code].to_le_bytes()[byte]);
        let bytes = std::array::from_fn(of_byte);
        Self { values, bytes }
    }
}

/// The amax of a block and its curve, from the largest magnitude and the sum of magnitudes of its `len` elements.
pub(crate) fn amax_and_curve(largest: f32, sum: f32, len: usize, expands: bool) -> (f32, Curve) {
    // A block that has overflowed keeps the largest number.
    let amax = largest.min(f32::MAX);
    let curve = match expands {
        true => Curve::for_spread(amax * len as f32 / sum),
        false => Curve::Linear,
    };
    (amax, curve)
}

/// Two factors of the magnitudes of a block that divide them by its amax, one after the other: an exact one, which keeps the second away
/// from both ends of f32, and one above the reciprocal. With them, the amax itself becomes at least 1.
#[inline(always)]
pub(crate) fn factors(amax: f32) -> [f32; 2] {
    match (1. / FAR..=FAR).contains(&amax) {
        true => [1., above_reciprocal(amax)],
        false => factors_far_from_one(amax),
    }
}

const FAR: f32 = (1u64 << 63) as f32;

/// The next number after the rounded reciprocal, which is not below the exact one.
#[inline(always)]
fn above_reciprocal(x: f32) -> f32 {
    f32::from_bits((1. / x).to_bits() + 1)
}

#[cold]
fn factors_far_from_one(amax: f32) -> [f32; 2] {
    let exact = match amax {
        // A block of zeros.
        0. => return [1.; 2],
        amax if amax < 1. => FAR,
        _ => 1. / FAR,
    };
    [exact, above_reciprocal(amax * exact)]
}

/// Sums of a block: element `i` belongs to sum `i % SUMS`.
const SUMS: usize = 16;

/// A block with zeros at its end.
type Padded = [f32; EXPANDED_BLOCK];

/// The largest magnitude, but for NaN, and the sum of magnitudes. They are added in pairs of neighbouring rows of [`SUMS`], and the
/// sums in pairs of both halves.
#[inline(always)]
fn measure(values: &Padded) -> (f32, f32) {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (rows, _) = values.as_chunks::<SUMS>();
    let mut largest = [0f32; SUMS];
    let mut sums = [[0f32; SUMS]; EXPANDED_BLOCK / SUMS];
    for (sums, row) in sums.iter_mut().zip(rows) {
        for i in 0..SUMS {
            sums[i] = row[i].abs();
            largest[i] = larger(largest[i], sums[i]);
        }
    }
    for distance in [1, 2, 4] {
        for row in (0..sums.len()).step_by(2 * distance) {
            let other = sums[row + distance];
            for (sum, x) in sums[row].iter_mut().zip(other) {
                *sum += x;
            }
        }
    }
    let [mut sums, ..] = sums;
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            sums[i] += sums[i + half];
            largest[i] = larger(largest[i], largest[i + half]);
        }
    }
    (largest[0], sums[0])
}

/// The definition of [`encode_expanded`](crate::encode_expanded) for a block.
#[inline(always)]
pub(crate) fn encode_block(
    values: &[f32],
    expansion: Expansion,
    words: Option<RandomWords<'_>>,
    codes: &mut [u8],
) -> (f32, Curve) {
    let mut padded = [0f32; EXPANDED_BLOCK];
    padded[..values.len()].copy_from_slice(values);
    let (largest, sum) = measure(&padded);
    let (amax, curve) = amax_and_curve(largest, sum, values.len(), expansion.expands);
    let factors = factors(amax);
    // One loop for each curve, in which the curve is a constant.
    let raised = match curve {
        Curve::Linear => raise(&padded, factors, Curve::Linear),
        Curve::Square => raise(&padded, factors, Curve::Square),
        Curve::Fourth => raise(&padded, factors, Curve::Fourth),
        Curve::Root => raise(&padded, factors, Curve::Root),
    };
    let mut rounded = [0u8; EXPANDED_BLOCK];
    match words {
        None => {
            let rounder = Rounder::new(&Cast::new(Format::E4M3)).with_mode(Mode::NearestEven);
            for (code, x) in rounded.iter_mut().zip(&raised) {
                *code = rounder.code(x.to_bits(), 0);
            }
        }
        Some(random) => {
            let (halves, _) = raised.as_chunks::<EXPANDED_WORDS>();
            let (codes, _) = rounded.as_chunks_mut::<EXPANDED_WORDS>();
            for (half, (codes, halves)) in codes.iter_mut().zip(halves).enumerate() {
                random.round_half(half, halves, codes);
            }
        }
    }
    if expansion.non_negative {
        for (code, value) in rounded.iter_mut().zip(&padded) {
            *code = (*code & 0x7F).max(u8::from(*value > 0.));
        }
    }
    codes.copy_from_slice(&rounded[..codes.len()]);
    (amax, curve)
}

/// The smallest normal number. A fixed-point number with 20 bits after the point counts codes of E4M3: from this magnitude on, it is the
/// bits of the f32 less [`BELOW`].
pub(crate) const NORMAL: f32 = 1. / 64.;
pub(crate) const BELOW: u32 = 120 << 23;

/// The code of a magnitude of at most 448, or NaN, by [`RANDOM_BITS`] random bits.
#[inline(always)]
fn round_up_at_random(y: f32, random: u32) -> u8 {
    let fixed = match y < NORMAL {
        // Codes are 2^-9 apart, and floats from NORMAL to its double are 2^-29 apart: the sum rounds to the fixed-point number.
        true => (y + NORMAL).to_bits() - NORMAL.to_bits(),
        false => y.to_bits().wrapping_sub(BELOW),
    };
    let code = (fixed.wrapping_add(random) >> RANDOM_BITS) as u8;
    if y.is_nan() { 0x7F } else { code }
}

/// A block on its curve.
#[inline(always)]
fn raise(values: &Padded, [exact, reciprocal]: [f32; 2], curve: Curve) -> Padded {
    let mut raised = *values;
    for x in &mut raised {
        let t = x.abs() * exact * reciprocal;
        // NaN stays NaN.
        let t = if t > 1. { 1. } else { t };
        *x = (LARGEST * curve.raise(t)).copysign(*x);
    }
    raised
}

/// The definition of [`decode_expanded`](crate::decode_expanded) for a block.
#[inline(always)]
pub(crate) fn decode_block(codes: &[u8], amax: f32, curve: Curve, values: &mut [f32]) {
    let shares = &curve.shares().values;
    for (value, code) in values.iter_mut().zip(codes) {
        *value = amax * shares[usize::from(*code)];
    }
}
