//! The curves on which blocks of a moment lie.

use std::sync::LazyLock;

use fp8_core::Format;

/// The largest number of E4M3.
pub(super) const LARGEST: f32 = 448.;

/// Exponents `k` of `448 (|x| / amax)^k`, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Curve {
    Linear = 0,
    Square = 1,
    Fourth = 2,
    Root = 3,
}

/// How many curves there are.
pub(crate) const CURVES: u8 = 4;

impl Curve {
    pub(super) fn of(number: u8) -> Self {
        match number {
            1 => Self::Square,
            2 => Self::Fourth,
            3 => Self::Root,
            _ => Self::Linear,
        }
    }

    /// The curve of a block by `spread`, its amax over its mean magnitude. Magnitudes of a sixteenth of the mean still get codes of full
    /// precision (E4M3 has them over a range of 2^14.8) up to the spread at which a smaller exponent takes over.
    pub(super) fn for_spread(spread: f32) -> Self {
        match spread {
            s if s <= 1.25 => Self::Fourth,
            s if s <= 10. => Self::Square,
            s if s <= 48. => Self::Linear,
            _ => Self::Root,
        }
    }

    /// `t^k` for `t` in `[0, 1]`.
    #[inline(always)]
    pub(super) fn raise(self, t: f32) -> f32 {
        match self {
            Self::Linear => t,
            Self::Square => t * t,
            Self::Fourth => (t * t) * (t * t),
            Self::Root => t.sqrt(),
        }
    }

    /// The inverse of [`Curve::raise`].
    #[inline(always)]
    fn lower(self, t: f32) -> f32 {
        match self {
            Self::Linear => t,
            Self::Square => t.sqrt(),
            Self::Fourth => t.sqrt().sqrt(),
            Self::Root => t * t,
        }
    }
}

/// The shares of the amax that codes stand for on a curve, with their signs.
pub(super) fn shares(curve: Curve) -> &'static [f32; 256] {
    &SHARES[curve as usize]
}

/// Those of every curve.
static SHARES: LazyLock<[[f32; 256]; CURVES as usize]> = LazyLock::new(|| {
    std::array::from_fn(|curve| {
        let curve = Curve::of(curve as u8);
        std::array::from_fn(|code| {
            let x = Format::E4M3.decode(code as u8);
            curve.lower(x.abs() / LARGEST).copysign(x)
        })
    })
});
