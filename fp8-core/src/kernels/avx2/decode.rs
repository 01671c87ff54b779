//! Decoding of E4M3 and E5M2: with its exponent and mantissa moved into place, a code is the upper byte of an f16, which the
//! processor converts. E4M3 has a smaller bias, so its f16 is 2^8 times too small.

use std::arch::x86_64::*;

use crate::{Format, kernels::LANES};

/// The values of a block of codes times a scale. The format is E5M2, or else E4M3.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(in super::super) fn block<const E5M2: bool>(
    codes: &[u8; LANES],
    dequant_scale: f32,
    values: &mut [f32; LANES],
) {
    let scale = _mm256_set1_ps(dequant_scale);
    for half in 0..2 {
        // SAFETY: sixteen codes of 32, from 0 or 16 on.
        let codes = unsafe { _mm_loadu_si128(codes.as_ptr().add(16 * half).cast()) };
        let words = _mm256_cvtepi8_epi16(codes);
        let halves = if E5M2 {
            _mm256_slli_epi16::<8>(words)
        } else {
            // The sign is in bits 7 to 15; bit 14 would belong to the exponent.
            let shifted = _mm256_slli_epi16::<7>(words);
            let halves = _mm256_and_si256(shifted, _mm256_set1_epi16(!0x4000));
            let magnitude = _mm256_slli_epi16::<9>(words);
            let nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7F << 9));
            // The NaN of all levels, with the sign of the code.
            let nan = _mm256_srli_epi16::<1>(nan);
            let quiet = _mm256_and_si256(nan, _mm256_set1_epi16(0x7E00));
            _mm256_or_si256(_mm256_andnot_si256(nan, halves), quiet)
        };
        let mut low = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
        let mut high = _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves));
        if !E5M2 {
            // Not multiplied into the scale, which could overflow.
            let factor = _mm256_set1_ps(256.);
            (low, high) = (_mm256_mul_ps(low, factor), _mm256_mul_ps(high, factor));
        }
        // SAFETY: sixteen values of 32, from 0 or 16 on.
        unsafe {
            let to = values.as_mut_ptr().add(16 * half);
            _mm256_storeu_ps(to, _mm256_mul_ps(low, scale));
            _mm256_storeu_ps(to.add(8), _mm256_mul_ps(high, scale));
        }
    }
}

/// Whether [`block`] decodes a format, and its `E5M2`.
pub(in super::super) fn handles(format: Format) -> Option<bool> {
    match format {
        Format::E4M3 => Some(false),
        Format::E5M2 => Some(true),
        Format::E4M3Fnuz | Format::E5M2Fnuz => None,
    }
}
