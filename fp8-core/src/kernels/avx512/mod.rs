//! The hot kernels, by hand for AVX-512: 64 elements at a time, as four vectors of f32.
//!
//! Only the loads and stores of this file touch memory; everything else computes on values. They mask elements beyond the end
//! of a slice, so tails need no extra code.

pub(super) mod amax;
pub(super) mod decode;
pub(super) mod encode;
pub(super) mod exact;
pub(super) mod expanded;
pub(super) mod halves;
pub(super) mod philox;
pub(super) mod round;
mod scales;
mod table;

use std::arch::x86_64::*;

use super::{Isa, IsaLevel};
use crate::{
    HighPrecision,
    high_precision::sealed::{Kind, Sealed},
};

/// Elements of a block: the codes of one vector of bytes.
const BLOCK: usize = 64;
/// Elements of a vector of f32.
const LANES: usize = 16;
/// Vectors of f32 in a block.
const VECTORS: usize = BLOCK / LANES;

/// A block in f32.
type Block = [__m512; VECTORS];

/// Whether the functions of this module may be called.
pub(super) fn is_in(isa: Isa) -> bool {
    isa.level() >= IsaLevel::Avx512
}

/// A mask of the first `len` lanes; all 64 if `len` is larger.
#[inline(always)]
fn first_lanes(len: usize) -> u64 {
    if len >= 64 { u64::MAX } else { (1 << len) - 1 }
}

/// The elements of `src` from `start` on in f32, and 0 past its end.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn load<T: HighPrecision>(src: &[T], start: usize) -> __m512 {
    let src = &src[start.min(src.len())..];
    let (from, lanes) = (src.as_ptr(), first_lanes(src.len()));
    // SAFETY: `KIND` names the type itself, and a masked load reads no element outside of its mask, which has none past
    // the end of `src`.
    unsafe {
        match <T as Sealed>::KIND {
            Kind::F32 => _mm512_maskz_loadu_ps(lanes as u16, from.cast()),
            Kind::Bf16 => {
                let bits = _mm256_maskz_loadu_epi16(lanes as u16, from.cast());
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
            }
            Kind::F16 => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes as u16, from.cast())),
            Kind::F64 => {
                let low = _mm512_maskz_loadu_pd(lanes as u8, from.cast());
                let high = _mm512_maskz_loadu_pd((lanes >> 8) as u8, from.wrapping_add(8).cast());
                let (low, high) = (_mm512_cvtpd_ps(low), _mm512_cvtpd_ps(high));
                _mm512_insertf32x8::<1>(_mm512_castps256_ps512(low), high)
            }
        }
    }
}

/// How many bytes ahead of the element being cast to prefetch. The processor's own prefetch stops at each page; with
/// this one, casts from memory take a quarter less time.
const PREFETCH: usize = 2048;

/// Prefetches the memory some blocks after `src`; the address need not be valid.
#[inline]
#[target_feature(enable = "avx512f")]
fn prefetch<T: HighPrecision>(src: &[T]) {
    for offset in (0..size_of_val(src).min(BLOCK * size_of::<T>())).step_by(64) {
        _mm_prefetch::<_MM_HINT_T0>(src.as_ptr().cast::<i8>().wrapping_add(PREFETCH + offset));
    }
}

/// The elements of `src` in f32, up to a block, and 0 past its end.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn load_block<T: HighPrecision>(src: &[T]) -> Block {
    [
        load(src, 0),
        load(src, LANES),
        load(src, 2 * LANES),
        load(src, 3 * LANES),
    ]
}

/// The bytes of `src`, up to 64, and 0 past its end.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn load_bytes(src: &[u8]) -> __m512i {
    // SAFETY: a masked load reads no element outside of its mask, which has none past the end of `src`.
    unsafe { _mm512_maskz_loadu_epi8(first_lanes(src.len()), src.as_ptr().cast()) }
}

/// Writes the first bytes to `dst`, up to 64.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn store_bytes(dst: &mut [u8], bytes: __m512i) {
    let mask = first_lanes(dst.len());
    // SAFETY: a masked store writes no element outside of its mask, which has none past the end of `dst`.
    unsafe { _mm512_mask_storeu_epi8(dst.as_mut_ptr().cast(), mask, bytes) }
}

/// Writes `values` to `dst` from `start` on and drops those past its end; none may be NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn store<T: HighPrecision>(dst: &mut [T], start: usize, values: __m512) {
    let start = start.min(dst.len());
    let dst = &mut dst[start..];
    let (lanes, to) = (first_lanes(dst.len()), dst.as_mut_ptr());
    // SAFETY: `KIND` names the type itself, and a masked store writes no element outside of its mask, which has none
    // past the end of `dst`.
    unsafe {
        match <T as Sealed>::KIND {
            Kind::F32 => _mm512_mask_storeu_ps(to.cast(), lanes as u16, values),
            Kind::Bf16 => unreachable!("stored in pairs of vectors"),
            Kind::F16 => {
                let rounded = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values);
                _mm256_mask_storeu_epi16(to.cast(), lanes as u16, rounded);
            }
            Kind::F64 => {
                let low = _mm512_cvtps_pd(_mm512_castps512_ps256(values));
                let high = _mm512_cvtps_pd(_mm512_extractf32x8_ps::<1>(values));
                _mm512_mask_storeu_pd(to.cast(), lanes as u8, low);
                _mm512_mask_storeu_pd(to.wrapping_add(8).cast(), (lanes >> 8) as u8, high);
            }
        }
    }
}

/// Writes the first of `values` to `dst`, up to a block; none may be NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn store_block<T: HighPrecision>(dst: &mut [T], values: Block) {
    if <T as Sealed>::KIND == Kind::Bf16 {
        let [a, b, c, d] = values;
        store_words(dst, 0, pair_of_bf16(a, b));
        store_words(dst, 2 * LANES, pair_of_bf16(c, d));
    } else {
        for (v, values) in values.into_iter().enumerate() {
            store(dst, v * LANES, values);
        }
    }
}

/// Two vectors as bf16; no element may be NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn pair_of_bf16(a: __m512, b: __m512) -> __m512i {
    let [a, b] = [a, b].map(|values| {
        let bits = _mm512_castps_si512(values);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let below_half = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF));
        _mm512_srli_epi32::<16>(_mm512_add_epi32(below_half, odd))
    });
    // Packing works within lanes of 128 bits.
    let order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    _mm512_permutexvar_epi64(order, _mm512_packus_epi32(a, b))
}

/// The bits of up to 32 16-bit elements, and 0 past the end of `src`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn load_words<T: HighPrecision>(src: &[T]) -> __m512i {
    assert_eq!(size_of::<T>(), 2);
    let lanes = first_lanes(src.len()) as u32;
    // SAFETY: the elements have 16 bits, and a masked load reads none outside of its mask, which has none past the
    // end of `src`.
    unsafe { _mm512_maskz_loadu_epi16(lanes, src.as_ptr().cast()) }
}

/// Writes 32 16-bit elements, given by their bits, to `dst` from `start` on and drops those past its end.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn store_words<T: HighPrecision>(dst: &mut [T], start: usize, bits: __m512i) {
    assert_eq!(size_of::<T>(), 2);
    let start = start.min(dst.len());
    let dst = &mut dst[start..];
    let lanes = first_lanes(dst.len()) as u32;
    // SAFETY: the elements have 16 bits, every pattern of which is a value of bf16 and of f16, and a masked store
    // writes none outside of its mask, which has none past the end of `dst`.
    unsafe { _mm512_mask_storeu_epi16(dst.as_mut_ptr().cast(), lanes, bits) }
}

/// A vector of sixteen words.
#[inline]
#[target_feature(enable = "avx512f")]
fn words(words: &[u32; LANES]) -> __m512i {
    // SAFETY: an array of sixteen words is as long as the vector, and the load asks for no alignment.
    unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
}

/// A block of words.
#[inline]
#[target_feature(enable = "avx512f")]
fn block_of_words(block: &[u32; BLOCK]) -> [__m512i; VECTORS] {
    let (vectors, _) = block.as_chunks::<LANES>();
    [
        words(&vectors[0]),
        words(&vectors[1]),
        words(&vectors[2]),
        words(&vectors[3]),
    ]
}

/// The words of a vector.
#[inline]
#[target_feature(enable = "avx512f")]
fn to_words(vector: __m512i) -> [u32; LANES] {
    let mut words = [0; LANES];
    // SAFETY: an array of sixteen words is as long as the vector, and the store asks for no alignment.
    unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), vector) };
    words
}
