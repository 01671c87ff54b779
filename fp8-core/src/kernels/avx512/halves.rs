//! Slices of floats to f32 and f16.

use std::arch::x86_64::*;

use half::f16;

use super::{Isa, LANES, is_in, load, store};
use crate::HighPrecision;
use crate::high_precision::sealed::Kind;

/// See `kernels::halves`.
pub(in super::super) fn widen<T: HighPrecision>(isa: Isa, src: &[T], dst: &mut [f32]) {
    assert!(is_in(isa), "{isa:?}");
    // SAFETY: as asserted, the processor has these features.
    unsafe { widen_all(src, dst) }
}

/// See `kernels::halves`.
pub(in super::super) fn narrow_f16(isa: Isa, src: &[f32], dst: &mut [f16]) {
    assert!(is_in(isa), "{isa:?}");
    // SAFETY: as asserted, the processor has these features.
    unsafe { narrow_all(src, dst) }
}

// Whole vectors are stored without a mask: with one, some processors take several times as long.

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn widen_all<T: HighPrecision>(src: &[T], dst: &mut [f32]) {
    let len = src.len().min(dst.len());
    let (src, tail) = src[..len].as_chunks::<LANES>();
    let (dst, rest) = dst[..len].as_chunks_mut::<LANES>();
    for (src, dst) in src.iter().zip(dst) {
        // SAFETY: `KIND` names the type itself, and a vector has as many elements as these arrays.
        unsafe {
            let wide = match T::KIND {
                Kind::Bf16 => {
                    let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(src.as_ptr().cast()));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
                }
                Kind::F16 => _mm512_cvtph_ps(_mm256_loadu_si256(src.as_ptr().cast())),
                Kind::F32 | Kind::F64 => load(src, 0),
            };
            _mm512_storeu_ps(dst.as_mut_ptr(), wide);
        }
    }
    store(rest, 0, load(tail, 0));
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn narrow_all(src: &[f32], dst: &mut [f16]) {
    let len = src.len().min(dst.len());
    let (src, tail) = src[..len].as_chunks::<LANES>();
    let (dst, rest) = dst[..len].as_chunks_mut::<LANES>();
    for (src, dst) in src.iter().zip(dst) {
        // SAFETY: a vector has as many elements as these arrays.
        unsafe {
            let wide = _mm512_loadu_ps(src.as_ptr());
            let narrow = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(wide);
            _mm256_storeu_si256(dst.as_mut_ptr().cast(), narrow);
        }
    }
    store(rest, 0, load(tail, 0));
}
