//! max |x| of segments of f32.

use std::arch::x86_64::*;

use super::{BLOCK, LANES, VECTORS, first_lanes, prefetch};
use crate::{
    HighPrecision,
    high_precision::sealed::{Kind, Sealed},
    kernels::Isa,
};

/// Merges max |x| of each segment of `len` elements into its entry of `out`. Returns `false` and does nothing if elements are not f32.
pub(crate) fn segments<T: HighPrecision>(isa: Isa, src: &[T], len: usize, out: &mut [f32]) -> bool {
    assert!(super::is_in(isa));
    if <T as Sealed>::KIND != Kind::F32 {
        return false;
    }
    // SAFETY: the kind says that T is f32. An `Isa` of this level exists only where these four features were found.
    unsafe {
        let src = std::slice::from_raw_parts(src.as_ptr().cast(), src.len());
        segments_of(src, len, out);
    }
    true
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn segments_of(src: &[f32], len: usize, out: &mut [f32]) {
    let magnitude = _mm512_set1_epi32(i32::MAX);
    for (src, out) in src.chunks(len).zip(out) {
        let mut max = [_mm512_setzero_si512(); VECTORS];
        let (blocks, rest) = src.as_chunks::<BLOCK>();
        for block in blocks {
            prefetch(block);
            for (v, max) in max.iter_mut().enumerate() {
                // SAFETY: a block is as long as its vectors.
                let bits = unsafe { _mm512_loadu_si512(block.as_ptr().add(v * LANES).cast()) };
                *max = _mm512_max_epu32(*max, _mm512_and_si512(bits, magnitude));
            }
        }
        for (rest, max) in rest.chunks(LANES).zip(&mut max) {
            let mask = first_lanes(rest.len()) as u16;
            // SAFETY: the mask has a bit for each element.
            let bits = unsafe { _mm512_maskz_loadu_epi32(mask, rest.as_ptr().cast()) };
            *max = _mm512_max_epu32(*max, _mm512_and_si512(bits, magnitude));
        }
        let [a, b, c, d] = max;
        let max = _mm512_max_epu32(_mm512_max_epu32(a, b), _mm512_max_epu32(c, d));
        let bits = _mm512_reduce_max_epu32(max);
        *out = f32::from_bits(bits.max(out.to_bits() & 0x7FFF_FFFF));
    }
}
