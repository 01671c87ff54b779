//! Products of few rows with packed codes on AVX2: each code is read once from memory, decoded in registers, and multiplied.
//!
//! A pair of sum indices lies in one 16-bit lane, so shifts move both codes to where f16 has its exponent and mantissa, and
//! the processor's conversion does the rest (`pack_f32.rs` has the same formats in memory). An E4M3 code gives an f16 that is
//! 2^8 times too small. The sums of a tile are too small by the same factor until they are stored, which is exact.

use super::kernel::Sums;
use super::layout::NARROW_PANEL;
use fp8_core::Format;
use std::arch::x86_64::*;

/// The most rows of a tile: twelve sums leave registers for two vectors of values and one of A.
pub(super) const ROWS: usize = 6;

/// Up to this many rows two panels are summed at a time: sums of one panel alone would wait for themselves.
const PAIRED_ROWS: usize = 2;

/// E4M3 read as f16, relative to its value.
const E4M3_AS_F16: f32 = 1. / 256.;

/// Computes the sums of `rows` rows by the panels `codes`, of one or two panels, or adds to them. Returns false, without
/// having changed a sum, where the codes are not E4M3 numbers or E5M2.
///
/// `a`: one tile of a slice, packed as A, from the first index of the sum on. Panels begin at that index and have its length.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn multiply(
    format: Format,
    rows: usize,
    a: &[f32],
    codes: &[&[u8]],
    sums: &mut Sums<'_>,
    accumulate: bool,
) -> bool {
    macro_rules! tile {
        ($($rows:literal: $panels:literal,)+) => {
            match (rows, codes) {
                $(($rows, codes) if let Ok(codes) = <[&[u8]; $panels]>::try_from(codes) => match format {
                    Format::E4M3 => tile::<$rows, $panels, false>(a, codes, sums, accumulate),
                    Format::E5M2 => tile::<$rows, $panels, true>(a, codes, sums, accumulate),
                    Format::E4M3Fnuz | Format::E5M2Fnuz => false,
                },)+
                _ => unreachable!("a tile of {rows} rows by {} panels", codes.len()),
            }
        };
    }
    tile!(1: 1, 1: 2, 2: 1, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1,)
}

/// How many panels a tile of `rows` rows takes at a time.
pub(super) const fn panels_at_once(rows: usize) -> usize {
    if rows <= PAIRED_ROWS { 2 } else { 1 }
}

/// The f16 values of 32 codes: of the even and of the odd sum index, sixteen columns each.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn halves<const E5M2: bool>(codes: __m256i) -> [__m256i; 2] {
    let even = _mm256_slli_epi16::<8>(codes);
    if E5M2 {
        let odd = _mm256_and_si256(codes, _mm256_set1_epi16(0xFF00u16 as i16));
        return [even, odd];
    }
    // The shift copies the sign into bit 14, which belongs to the exponent.
    let mask = _mm256_set1_epi16(0xBF80u16 as i16);
    [even, codes].map(|codes| _mm256_and_si256(_mm256_srai_epi16::<1>(codes), mask))
}

#[target_feature(enable = "avx2,fma,f16c")]
fn tile<const R: usize, const P: usize, const E5M2: bool>(
    a: &[f32],
    codes: [&[u8]; P],
    sums: &mut Sums<'_>,
    accumulate: bool,
) -> bool {
    let (a, _) = a.as_chunks::<R>();
    let (a, _) = a.as_chunks::<2>();
    let codes = codes.map(|codes| codes.as_chunks::<{ 2 * NARROW_PANEL }>().0);
    let pairs = codes[0].len();
    assert!(a.len() >= pairs && codes.iter().all(|codes| codes.len() == pairs));
    assert!(sums.values.len() >= (R - 1) * sums.stride + P * NARROW_PANEL);
    let scale = if E5M2 { 1. } else { E4M3_AS_F16 };
    let (stride, sums) = (sums.stride, sums.values.as_mut_ptr());
    let mut tile = [[[_mm256_setzero_ps(); 2]; P]; R];
    if accumulate {
        let scale = _mm256_set1_ps(scale);
        for (row, tile) in tile.iter_mut().enumerate() {
            for (half, sum) in tile.as_flattened_mut().iter_mut().enumerate() {
                // SAFETY: R rows of P panels were checked above.
                let kept = unsafe { _mm256_loadu_ps(sums.add(row * stride + half * 8)) };
                *sum = _mm256_mul_ps(kept, scale);
            }
        }
    }
    // Twice the greatest code: 0xFE only where one is NaN.
    let mut greatest = _mm256_setzero_si256();
    for pair in 0..pairs {
        for (panel, codes) in codes.iter().enumerate() {
            // SAFETY: all panels have this many pairs, as checked above.
            let codes = unsafe { codes.get_unchecked(pair) };
            // SAFETY: a pair of sum indices of a panel is 32 codes.
            let codes = unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) };
            if !E5M2 {
                greatest = _mm256_max_epu8(greatest, _mm256_add_epi8(codes, codes));
            }
            for (index, halves) in halves::<E5M2>(codes).into_iter().enumerate() {
                let values = [
                    _mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                    _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves)),
                ];
                // SAFETY: A has this many pairs, as checked above.
                let a = unsafe { &a.get_unchecked(pair)[index] };
                for (a, tile) in a.iter().zip(&mut tile) {
                    let a = _mm256_broadcast_ss(a);
                    let [left, right] = &mut tile[panel];
                    *left = _mm256_fmadd_ps(a, values[0], *left);
                    *right = _mm256_fmadd_ps(a, values[1], *right);
                }
            }
        }
    }
    let nan = _mm256_cmpeq_epi8(greatest, _mm256_set1_epi8(0xFEu8 as i8));
    if !E5M2 && _mm256_movemask_epi8(nan) != 0 {
        return false;
    }
    let scale = _mm256_set1_ps(1. / scale);
    for (row, tile) in tile.iter().enumerate() {
        for (half, &sum) in tile.as_flattened().iter().enumerate() {
            let sum = _mm256_mul_ps(sum, scale);
            // SAFETY: as for the load.
            unsafe { _mm256_storeu_ps(sums.add(row * stride + half * 8), sum) };
        }
    }
    true
}
