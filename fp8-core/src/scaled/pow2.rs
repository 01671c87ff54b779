//! How a size becomes a power of two.

use crate::floor_to_power_of_two;

/// How the factors that rules take out of sums, square roots of their lengths, become powers of two.
///
/// ```
/// use fp8_core::scaled::Pow2Rounding;
/// let of = |rounding: Pow2Rounding| rounding.of_word(0).round(5.0);
/// assert_eq!([of(Pow2Rounding::None), of(Pow2Rounding::Down), of(Pow2Rounding::Up)], [5.0, 4.0, 8.0]);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Pow2Rounding {
    /// The factor as it is: scales need not be powers of two, and each rescaling rounds the data.
    None,
    /// The largest power of two not above it.
    #[default]
    Down,
    /// The smallest power of two not below it. (The original library doubles exact powers of two.)
    Up,
    /// One of the two beside it, at random, so that the mean is the factor.
    Stochastic,
}

/// A [`Pow2Rounding`] with the random bits of one operation.
#[derive(Clone, Copy, Debug)]
pub struct Pow2Round {
    rounding: Pow2Rounding,
    word: u32,
}

impl Pow2Rounding {
    /// This rounding with `word` for random bits, which only [`Pow2Rounding::Stochastic`] looks at.
    pub const fn of_word(self, word: u32) -> Pow2Round {
        Pow2Round {
            rounding: self,
            word,
        }
    }
}

impl Pow2Round {
    /// `factor`, a positive normal number, rounded.
    pub fn round(self, factor: f32) -> f32 {
        let down = floor_to_power_of_two(factor);
        let up = match self.rounding {
            Pow2Rounding::None => return factor,
            Pow2Rounding::Down => false,
            Pow2Rounding::Up => factor > down,
            // The fraction bits are the distance to the power below, as a share of the gap.
            Pow2Rounding::Stochastic => self.word >> 9 < factor.to_bits() & 0x007F_FFFF,
        };
        if up { down * 2.0 } else { down }
    }
}

impl Default for Pow2Round {
    fn default() -> Self {
        Pow2Rounding::Down.of_word(0)
    }
}
