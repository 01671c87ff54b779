//! max |x|, as a maximum over integers: the bits of a magnitude order as its value does, infinity above all numbers
//! and NaN above infinity.

use super::{LANES, dispatch};
use crate::HighPrecision;

/// A running maximum of magnitudes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Amax(u32);

impl Amax {
    /// Takes in the bits of another maximum.
    pub(crate) fn merge(&mut self, bits: u32) {
        self.0 = self.0.max(bits);
    }

    pub(crate) fn bits(self) -> u32 {
        self.0
    }

    pub(crate) fn value(self) -> f32 {
        f32::from_bits(self.0)
    }
}

#[inline(always)]
fn magnitude<T: HighPrecision>(x: T) -> u32 {
    x.to_f32().to_bits() & 0x7FFF_FFFF
}

/// Merges the magnitudes of a chunk into a maximum for each lane.
#[inline(always)]
pub(super) fn lane_max<T: HighPrecision>(src: &[T; LANES], max: &mut [u32; LANES]) {
    for i in 0..LANES {
        max[i] = max[i].max(magnitude(src[i]));
    }
}

dispatch! {
    /// Merges max |x| of each segment of `len` elements into its entry of `out`.
    pub(crate) fn segments [T: HighPrecision] [T] (src: &[T], len: usize, out: &mut [f32]) = segments_body
}

dispatch! {
    /// Merges |x| of each element into its entry of `out`.
    pub(crate) fn columns [T: HighPrecision] [T] (src: &[T], out: &mut [f32]) = columns_body
}

#[inline(always)]
fn segments_body<T: HighPrecision>(src: &[T], len: usize, out: &mut [f32]) {
    for (src, out) in src.chunks(len).zip(out) {
        let mut max = [0; LANES];
        let (chunks, rest) = src.as_chunks::<LANES>();
        for chunk in chunks {
            lane_max(chunk, &mut max);
        }
        let mut bits = out.to_bits() & 0x7FFF_FFFF;
        for &x in rest {
            bits = bits.max(magnitude(x));
        }
        *out = f32::from_bits(max.into_iter().fold(bits, u32::max));
    }
}

#[inline(always)]
fn columns_body<T: HighPrecision>(src: &[T], out: &mut [f32]) {
    for (&x, out) in src.iter().zip(out) {
        *out = f32::from_bits(magnitude(x).max(magnitude(*out)));
    }
}
