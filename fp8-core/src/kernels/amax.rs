//! max |x|, as a maximum over integers: the bits of magnitudes have the order of their values, with infinity above all
//! numbers and NaN above infinity.

#[cfg(target_arch = "x86_64")]
use super::avx512;
use super::{Isa, LANES, Layout, dispatch};
use crate::{HighPrecision, high_precision::sealed::Sealed};

/// A running maximum of magnitudes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Amax(u32);

impl Amax {
    /// Merges the bits of another maximum.
    pub(crate) fn merge(&mut self, bits: u32) {
        self.0 = self.0.max(bits);
    }

    pub(crate) fn value(self) -> f32 {
        f32::from_bits(self.0)
    }
}

/// The largest magnitude so far, in each lane of a chunk. 16-bit types stay 16 bits wide.
pub(super) type LaneMax<T> = [<T as Sealed>::Magnitude; LANES];

/// Merges the magnitudes of a chunk into a maximum for each lane.
#[inline(always)]
pub(super) fn lane_max<T: HighPrecision>(src: &[T; LANES], max: &mut LaneMax<T>) {
    for i in 0..LANES {
        max[i] = max[i].max(src[i].magnitude());
    }
}

/// The bits of the largest of all lanes.
#[inline(always)]
pub(super) fn max_bits<T: HighPrecision>(max: LaneMax<T>) -> u32 {
    T::magnitude_bits(max.into_iter().fold(T::Magnitude::default(), Ord::max))
}

/// The length from which a plain loop over a segment is faster than chunks.
const LONG: usize = 128;

/// Merges max |x| of the elements of each scale into its entry of `out`.
pub(crate) fn merge<T: HighPrecision>(isa: Isa, src: &[T], layout: Layout, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if let (true, Layout::Segments(len)) = (avx512::is_in(isa), layout)
        && avx512::amax::segments(isa, src, len, out)
    {
        return;
    }
    generic(isa, src, layout, out);
}

dispatch! {
    fn generic [T: HighPrecision] [T] (src: &[T], layout: Layout, out: &mut [f32]) {
        match layout {
            Layout::Segments(len) => segments(src, len, out),
            Layout::PerElement => {
                for (&x, out) in src.iter().zip(out) {
                    *out = f32::from_bits(T::magnitude_bits(x.magnitude()).max(out.magnitude()));
                }
            }
        }
    }
}

#[inline(always)]
fn segments<T: HighPrecision>(src: &[T], len: usize, out: &mut [f32]) {
    for (src, out) in src.chunks(len).zip(out) {
        let max = if len < LONG {
            let mut max = LaneMax::<T>::default();
            let (chunks, rest) = src.as_chunks::<LANES>();
            for chunk in chunks {
                lane_max(chunk, &mut max);
            }
            max_of(rest).max(max.into_iter().fold(T::Magnitude::default(), Ord::max))
        } else {
            max_of(src)
        };
        *out = f32::from_bits(T::magnitude_bits(max).max(out.magnitude()));
    }
}

/// The largest magnitude of a slice, in a loop that compilers recognize.
#[inline(always)]
fn max_of<T: HighPrecision>(src: &[T]) -> T::Magnitude {
    src.iter()
        .fold(T::Magnitude::default(), |max, x| max.max(x.magnitude()))
}
