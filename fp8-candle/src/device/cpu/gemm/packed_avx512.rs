//! [`packed_f32`](super::packed_f32) with AVX-512, for processors without bf16 units, which are slow with subnormal numbers.

use super::kernel::Sums;
use super::layout::PANEL;
use super::packed_f32::{Route, TileRows, ahead, factor, packed_tile, packed_tiles, prefetch};
use fp8_core::Format;
use std::arch::x86_64::*;

/// The most rows of a tile.
pub(super) const ROWS: usize = 12;

/// Computes the sums of `rows` rows by the panels `codes`, as many as
/// [`panels_at_once`](super::packed_f32::panels_at_once) at most, or adds to them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn multiply(
    format: Format,
    rows: usize,
    a: TileRows<'_>,
    codes: &[&[u8]],
    sums: &mut Sums<'_>,
    accumulate: bool,
) {
    packed_tiles!(
        rows, codes, (format, a, sums, accumulate),
        1: 1, 1: 2, 1: 3, 1: 4, 2: 1, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1, 8: 1, 9: 1, 10: 1, 11: 1, 12: 1,
    )
}

packed_tile! {
    "avx512f,avx512bw,avx512vl,avx512dq", PANEL, __m512i;
    _mm512_setzero_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_mul_ps, _mm512_fmadd_ps, _mm512_set1_ps, splat;
    _mm512_loadu_si512
}

/// [`tile`] for these numbers of rows and panels.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn tile_of<const R: usize, const P: usize>(
    format: Format,
    a: TileRows<'_>,
    codes: [&[u8]; P],
    sums: &mut Sums<'_>,
    accumulate: bool,
) {
    match format {
        Format::E4M3 => tile::<R, P, false, false>(a, codes, sums, accumulate),
        Format::E5M2 => tile::<R, P, true, false>(a, codes, sums, accumulate),
        Format::E4M3Fnuz | Format::E5M2Fnuz => unreachable!("{format} is not packed"),
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn splat(value: &f32) -> __m512 {
    _mm512_set1_ps(*value)
}

/// The values of 64 codes, of the even and of the odd sum index, columns in order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn values<const E5M2: bool, const SHIFT: bool>(codes: __m512i) -> [[__m512; 2]; 2] {
    const { assert!(!SHIFT, "no such route here") };
    // The even code where the odd one is.
    let even = _mm512_slli_epi16::<8>(codes);
    let (even, odd) = if E5M2 {
        let mask = _mm512_set1_epi16(0xFF00u16 as i16);
        (even, _mm512_and_si512(codes, mask))
    } else {
        // The shift copies the sign into bit 14, which belongs to the exponent.
        let mask = _mm512_set1_epi16(0xBF80u16 as i16);
        (
            _mm512_and_si512(_mm512_srai_epi16::<1>(even), mask),
            _mm512_and_si512(_mm512_srai_epi16::<1>(codes), mask),
        )
    };
    [converted(even), converted(odd)]
}

/// 32 numbers of f16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn converted(halves: __m512i) -> [__m512; 2] {
    [
        _mm512_cvtph_ps(_mm512_castsi512_si256(halves)),
        _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(halves)),
    ]
}

/// Columns are in order already.
#[inline(always)]
fn split<const SHIFT: bool>(columns: [__m512; 2]) -> [__m512; 2] {
    columns
}

/// Columns are in order already.
#[inline(always)]
fn join<const SHIFT: bool>(columns: [__m512; 2]) -> [__m512; 2] {
    columns
}
