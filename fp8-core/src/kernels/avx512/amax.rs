//! max |x| of segments.

use std::arch::x86_64::*;

use super::{BLOCK, LANES, VECTORS, first_lanes, load_words, prefetch};
use crate::{
    HighPrecision,
    high_precision::sealed::{Kind, Sealed},
    kernels::{Isa, convert},
};
use half::{bf16, f16};

/// Merges max |x| of each segment of `len` elements into its entry of `out`. Returns `false` and does nothing if elements are f64.
pub(crate) fn segments<T: HighPrecision>(isa: Isa, src: &[T], len: usize, out: &mut [f32]) -> bool {
    assert!(super::is_in(isa));
    match <T as Sealed>::KIND {
        Kind::F32 => {}
        Kind::Bf16 | Kind::F16 => {
            // SAFETY: an `Isa` of this level exists only where these four features were found.
            unsafe { segments_of_words(src, len, out) };
            return true;
        }
        Kind::F64 => return false,
    }
    // SAFETY: the kind says that T is f32, and the level has the features, as above.
    unsafe {
        let src = std::slice::from_raw_parts(src.as_ptr().cast(), src.len());
        let done = if len == SHORT {
            short_segments(src, out)
        } else {
            0
        };
        segments_of(&src[done * len..], len, &mut out[done..]);
    }
    true
}

/// The length of the segments of [`short_segments`], the blocks of MX.
const SHORT: usize = 32;

/// Merges the maxima of segments of [`SHORT`] elements, [`LANES`] at a time: together they take far fewer shuffles. Returns how many.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn short_segments(src: &[f32], out: &mut [f32]) -> usize {
    let magnitude = _mm512_set1_epi32(i32::MAX);
    let (groups, _) = src.as_chunks::<{ LANES * SHORT }>();
    let (outs, _) = out.as_chunks_mut::<LANES>();
    let count = groups.len().min(outs.len());
    for (group, out) in groups.iter().zip(outs) {
        let (segments, _) = group.as_chunks::<SHORT>();
        let mut max = [_mm512_setzero_si512(); LANES];
        for (segment, max) in segments.iter().zip(&mut max) {
            prefetch(segment);
            // SAFETY: a segment is as long as two vectors.
            let [low, high] =
                [0, LANES].map(|at| unsafe { _mm512_loadu_si512(segment.as_ptr().add(at).cast()) });
            let [low, high] = [low, high].map(|bits| _mm512_and_si512(bits, magnitude));
            *max = _mm512_max_epu32(low, high);
        }
        // Each step halves the candidates of a segment and puts two vectors into one.
        let mut twos = [_mm512_setzero_si512(); LANES / 2];
        for (two, max) in twos.iter_mut().zip(max.as_chunks::<2>().0) {
            let low = _mm512_unpacklo_epi32(max[0], max[1]);
            *two = _mm512_max_epu32(low, _mm512_unpackhi_epi32(max[0], max[1]));
        }
        let mut fours = [_mm512_setzero_si512(); LANES / 4];
        for (four, two) in fours.iter_mut().zip(twos.as_chunks::<2>().0) {
            let low = _mm512_unpacklo_epi64(two[0], two[1]);
            *four = _mm512_max_epu32(low, _mm512_unpackhi_epi64(two[0], two[1]));
        }
        let lanes = |a: __m512i, b: __m512i| {
            let even = _mm512_shuffle_i32x4::<0x88>(a, b);
            _mm512_max_epu32(even, _mm512_shuffle_i32x4::<0xDD>(a, b))
        };
        let max = lanes(lanes(fours[0], fours[1]), lanes(fours[2], fours[3]));
        // SAFETY: `out` is as long as a vector.
        unsafe {
            let before = _mm512_and_si512(_mm512_loadu_si512(out.as_ptr().cast()), magnitude);
            _mm512_storeu_si512(out.as_mut_ptr().cast(), _mm512_max_epu32(max, before));
        }
    }
    count * LANES
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

/// [`segments`] of a type with 16 bits.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn segments_of_words<T: HighPrecision>(src: &[T], len: usize, out: &mut [f32]) {
    let magnitude = _mm512_set1_epi16(i16::MAX);
    for (src, out) in src.chunks(len).zip(out) {
        let mut max = [_mm512_setzero_si512(); 2];
        let (blocks, rest) = src.as_chunks::<BLOCK>();
        for block in blocks {
            prefetch(block);
            for (half, max) in block.as_chunks::<{ BLOCK / 2 }>().0.iter().zip(&mut max) {
                *max = _mm512_max_epu16(*max, _mm512_and_si512(load_words(half), magnitude));
            }
        }
        for (rest, max) in rest.chunks(BLOCK / 2).zip(&mut max) {
            *max = _mm512_max_epu16(*max, _mm512_and_si512(load_words(rest), magnitude));
        }
        let word = largest_word(_mm512_max_epu16(max[0], max[1]));
        let max = match <T as Sealed>::KIND {
            Kind::F16 => convert::f16_to_f32(f16::from_bits(word)),
            _ => convert::bf16_to_f32(bf16::from_bits(word)),
        };
        *out = f32::from_bits(max.to_bits().max(out.to_bits() & 0x7FFF_FFFF));
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn largest_word(words: __m512i) -> u16 {
    let half = _mm512_extracti64x4_epi64::<1>(words);
    let max = _mm256_max_epu16(_mm512_castsi512_si256(words), half);
    let half = _mm256_extracti128_si256::<1>(max);
    let max = _mm_max_epu16(_mm256_castsi256_si128(max), half);
    // The smallest complement belongs to the largest word.
    let least = _mm_minpos_epu16(_mm_xor_si128(max, _mm_set1_epi16(-1)));
    !_mm_cvtsi128_si32(least) as u16
}
