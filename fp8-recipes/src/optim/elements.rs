//! Element types that are updated in f32, and the loops that round at random.

use fp8_core::{HighPrecision, StochasticKey, stochastic_round};
use half::{bf16, f16};

/// Elements that wait in f32 to be rounded together.
const PIECE: usize = 512;

/// An element type that is updated in f32.
pub(super) trait Element: Copy + Default + PartialEq + Send + Sync {
    fn widen(self) -> f32;
    /// Rounds to nearest.
    fn narrow(x: f32) -> Self;
    fn same_bits(self, other: Self) -> bool;
    /// Rounds at random, what is beyond the range to its end; elements are numbered from `first` on.
    fn stochastic(key: StochasticKey, first: u64, wide: &[f32], out: &mut [Self]);
}

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        x
    }
    #[inline(always)]
    fn same_bits(self, other: Self) -> bool {
        self.to_bits() == other.to_bits()
    }
    /// Nothing to round.
    fn stochastic(_: StochasticKey, _: u64, wide: &[f32], out: &mut [Self]) {
        out.copy_from_slice(wide);
    }
}

macro_rules! half {
    ($type:ty) => {
        impl Element for $type {
            #[inline(always)]
            fn widen(self) -> f32 {
                HighPrecision::to_f32(self)
            }
            #[inline(always)]
            fn narrow(x: f32) -> Self {
                HighPrecision::from_f32(x)
            }
            #[inline(always)]
            fn same_bits(self, other: Self) -> bool {
                self.to_bits() == other.to_bits()
            }
            fn stochastic(key: StochasticKey, first: u64, wide: &[f32], out: &mut [Self]) {
                stochastic_round(key, first, wide, out);
                // Rare: a look first, which vectorizes.
                let largest = f32::from(<$type>::MAX);
                if !wide
                    .iter()
                    .fold(false, |found, x| found | (x.abs() > largest))
                {
                    return;
                }
                for (out, wide) in out.iter_mut().zip(wide) {
                    if out.is_infinite() && wide.is_finite() {
                        *out = if *wide < 0. {
                            <$type>::MIN
                        } else {
                            <$type>::MAX
                        };
                    }
                }
            }
        }
    };
}
half!(bf16);
half!(f16);

/// What a variable that may have been written to from outside stands for: where it is not its master rounded, its own value counts.
#[inline(always)]
pub(super) fn current<T: Element, M: Element>(theta: T, master: M) -> f32 {
    match T::narrow(master.widen()).same_bits(theta) {
        true => master.widen(),
        false => theta.widen(),
    }
}

/// Puts `step(i, value)` for each element into the master, rounded at random, and the master into the variable.
pub(super) fn through_master<T: Element, M: Element>(
    key: StochasticKey,
    first: u64,
    theta: &mut [T],
    master: &mut [M],
    mut step: impl FnMut(usize, f32) -> f32,
) {
    let mut wide = [0f32; PIECE];
    let pieces = theta.chunks_mut(PIECE).zip(master.chunks_mut(PIECE));
    for (piece, (theta, master)) in pieces.enumerate() {
        let (start, wide) = (piece * PIECE, &mut wide[..theta.len()]);
        for (i, ((wide, theta), master)) in wide.iter_mut().zip(&*theta).zip(&*master).enumerate() {
            *wide = step(start + i, current(*theta, *master));
        }
        M::stochastic(key, first + start as u64, wide, master);
        for (theta, master) in theta.iter_mut().zip(master) {
            *theta = T::narrow(master.widen());
        }
    }
}

/// Puts `step(i, value)` for each element into the variable, rounded at random.
pub(super) fn through_variable<T: Element>(
    key: StochasticKey,
    first: u64,
    theta: &mut [T],
    mut step: impl FnMut(usize, f32) -> f32,
) {
    let mut wide = [0f32; PIECE];
    for (piece, theta) in theta.chunks_mut(PIECE).enumerate() {
        let (start, wide) = (piece * PIECE, &mut wide[..theta.len()]);
        for (i, (wide, theta)) in wide.iter_mut().zip(&*theta).enumerate() {
            *wide = step(start + i, theta.widen());
        }
        T::stochastic(key, first + start as u64, wide, theta);
    }
}
