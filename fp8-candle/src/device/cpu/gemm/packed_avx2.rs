//! [`packed_f32`](super::packed_f32) with AVX2.

use super::kernel::Sums;
use super::layout::NARROW_PANEL;
use super::packed_f32::{Route, TileRows, ahead, factor, packed_tile, packed_tiles, prefetch};
use fp8_core::Format;
use std::arch::x86_64::*;
use std::sync::OnceLock;

/// The most rows of a tile: twelve sums leave registers for two vectors of values and one of A.
pub(super) const ROWS: usize = 6;

/// The faster way on this processor.
pub(super) fn route() -> Route {
    static ROUTE: OnceLock<Route> = OnceLock::new();
    *ROUTE.get_or_init(|| {
        let vendor = __cpuid(0);
        let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
        match name.as_flattened() {
            b"AuthenticAMD" | b"HygonGenuine" => Route::Shift,
            _ => Route::Half,
        }
    })
}

/// Computes the sums of `rows` rows by the panels `codes`, as many as
/// [`panels_at_once`](super::packed_f32::panels_at_once) at most, or adds to them.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn multiply(
    how: (Format, Route),
    rows: usize,
    a: TileRows<'_>,
    codes: &[&[u8]],
    sums: &mut Sums<'_>,
    accumulate: bool,
) {
    packed_tiles!(rows, codes, (how, a, sums, accumulate), 1: 1, 1: 2, 1: 3, 1: 4, 2: 1, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1,)
}

packed_tile! {
    "avx2,fma,f16c", NARROW_PANEL, __m256i;
    _mm256_setzero_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_mul_ps, _mm256_fmadd_ps, _mm256_set1_ps, _mm256_broadcast_ss;
    _mm256_loadu_si256
}

/// [`tile`] for these numbers of rows and panels.
#[target_feature(enable = "avx2,fma,f16c")]
fn tile_of<const R: usize, const P: usize>(
    how: (Format, Route),
    a: TileRows<'_>,
    codes: [&[u8]; P],
    sums: &mut Sums<'_>,
    accumulate: bool,
) {
    match how {
        (Format::E4M3, Route::Half) => tile::<R, P, false, false>(a, codes, sums, accumulate),
        (Format::E4M3, Route::Shift) => tile::<R, P, false, true>(a, codes, sums, accumulate),
        (Format::E5M2, Route::Half) => tile::<R, P, true, false>(a, codes, sums, accumulate),
        (Format::E5M2, Route::Shift) => tile::<R, P, true, true>(a, codes, sums, accumulate),
        (Format::E4M3Fnuz | Format::E5M2Fnuz, _) => unreachable!("{} is not packed", how.0),
    }
}

/// The values of 32 codes, of the even and of the odd sum index, in the order of columns that [`split`] gives.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn values<const E5M2: bool, const SHIFT: bool>(codes: __m256i) -> [[__m256; 2]; 2] {
    // The even code where the odd one is.
    let even = _mm256_slli_epi16::<8>(codes);
    // Shifts copy the sign into bits that belong to the exponent.
    if SHIFT {
        let mask = _mm256_set1_epi16(if E5M2 { 0x8FE0u16 } else { 0x87F0 } as i16);
        let (even, odd) = if E5M2 {
            (_mm256_srai_epi16::<3>(even), _mm256_srai_epi16::<3>(codes))
        } else {
            (_mm256_srai_epi16::<4>(even), _mm256_srai_epi16::<4>(codes))
        };
        let (even, odd) = (_mm256_and_si256(even, mask), _mm256_and_si256(odd, mask));
        [shifted(even), shifted(odd)]
    } else if E5M2 {
        let mask = _mm256_set1_epi16(0xFF00u16 as i16);
        [converted(even), converted(_mm256_and_si256(codes, mask))]
    } else {
        let mask = _mm256_set1_epi16(0xBF80u16 as i16);
        let even = _mm256_and_si256(_mm256_srai_epi16::<1>(even), mask);
        let odd = _mm256_and_si256(_mm256_srai_epi16::<1>(codes), mask);
        [converted(even), converted(odd)]
    }
}

/// Sixteen numbers of f16.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn converted(halves: __m256i) -> [__m256; 2] {
    [
        _mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
        _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves)),
    ]
}

/// Sixteen upper halves of f32: those in even places, then those in odd ones.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn shifted(halves: __m256i) -> [__m256; 2] {
    let odd = _mm256_and_si256(halves, _mm256_set1_epi32(0xFFFF_0000u32 as i32));
    [
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves)),
        _mm256_castsi256_ps(odd),
    ]
}

/// Two vectors of neighbouring columns as [`values`] has them.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn split<const SHIFT: bool>([left, right]: [__m256; 2]) -> [__m256; 2] {
    if !SHIFT {
        return [left, right];
    }
    let in_order = |values| {
        _mm256_castsi256_ps(_mm256_permute4x64_epi64::<0b11_01_10_00>(
            _mm256_castps_si256(values),
        ))
    };
    [
        in_order(_mm256_shuffle_ps::<0b10_00_10_00>(left, right)),
        in_order(_mm256_shuffle_ps::<0b11_01_11_01>(left, right)),
    ]
}

/// The inverse of [`split`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn join<const SHIFT: bool>([even, odd]: [__m256; 2]) -> [__m256; 2] {
    if !SHIFT {
        return [even, odd];
    }
    let (low, high) = (_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd));
    [
        _mm256_permute2f128_ps::<0x20>(low, high),
        _mm256_permute2f128_ps::<0x31>(low, high),
    ]
}
