//! The hot kernels by hand for AVX-512, 64 elements at a time as four vectors of f32.
//!
//! Only the loads and stores of this file touch memory; everything else computes on values. A slice shorter than what
//! is asked of it is completed by masks, so tails need no code of their own.

pub(super) mod encode;
mod philox;
mod round;

use std::arch::x86_64::*;

pub(super) use round::Wide;

use super::{Isa, IsaLevel};
use crate::{
    HighPrecision,
    slice::sealed::{Kind, Sealed},
};

/// Elements of a block: the codes of one vector of bytes.
const BLOCK: usize = 64;
/// Elements of a vector of f32.
const LANES: usize = 16;
/// Vectors of f32 in a block.
const VECTORS: usize = BLOCK / LANES;

/// The f32 of a block.
type Block = [__m512; VECTORS];

/// Whether the functions of this module may be called.
pub(super) fn is_in(isa: Isa) -> bool {
    isa.level() >= IsaLevel::Avx512
}

/// A mask of the first `len` lanes, all of 64 where `len` is more.
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

/// A vector of sixteen words.
#[inline]
#[target_feature(enable = "avx512f")]
fn words(words: &[u32; LANES]) -> __m512i {
    // SAFETY: an array of sixteen words is as long as the vector, and the load asks for no alignment.
    unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
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
