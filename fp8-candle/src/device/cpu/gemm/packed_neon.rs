//! [`packed_f32`](super::packed_f32) with NEON, by shifts to the upper half of f32.
//!
//! This has been run under an emulator only, and its speed is unmeasured.

use super::kernel::Sums;
use super::layout::NARROW_PANEL;
use super::packed_f32::{Route, TileRows, ahead, factor, packed_tiles, prefetch};
use super::row_neon::{self, Row};
use fp8_core::Format;
use std::arch::aarch64::*;

/// The most rows of a tile: 24 sums leave eight registers for values and A.
pub(super) const ROWS: usize = 6;

/// A pair of sum indices of a panel.
type Pair = [u8; 2 * NARROW_PANEL];

/// Computes the sums of `rows` rows by the panels `codes`, as many as
/// [`panels_at_once`](super::packed_f32::panels_at_once) at most, or adds to them.
#[target_feature(enable = "neon")]
pub(super) fn multiply(
    format: Format,
    rows: usize,
    a: TileRows<'_>,
    codes: &[&[u8]],
    sums: &mut Sums<'_>,
    accumulate: bool,
) {
    packed_tiles!(rows, codes, (format, a, sums, accumulate), 1: 1, 1: 2, 1: 3, 1: 4, 2: 1, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1,)
}

/// [`tile`] for these numbers of rows and panels.
#[target_feature(enable = "neon")]
fn tile_of<const R: usize, const P: usize>(
    format: Format,
    a: TileRows<'_>,
    codes: [&[u8]; P],
    sums: &mut Sums<'_>,
    accumulate: bool,
) {
    match format {
        Format::E4M3 => tile::<R, P, false>(a, codes, sums, accumulate),
        Format::E5M2 => tile::<R, P, true>(a, codes, sums, accumulate),
        Format::E4M3Fnuz | Format::E5M2Fnuz => unreachable!("{format} is not packed"),
    }
}

/// `R` rows by `P` neighbouring panels. Panels begin at the first index of `a` and have the length of the sum, which may go over several slices.
#[target_feature(enable = "neon")]
fn tile<const R: usize, const P: usize, const E5M2: bool>(
    a: TileRows<'_>,
    codes: [&[u8]; P],
    sums: &mut Sums<'_>,
    accumulate: bool,
) {
    let format = if E5M2 { Format::E5M2 } else { Format::E4M3 };
    let factor = factor(format, Route::Shift);
    let codes = codes.map(pairs_of);
    let pairs = codes[0].len();
    assert!(codes.iter().all(|codes| codes.len() == pairs));
    assert!(sums.values.len() >= (R - 1) * sums.stride + P * NARROW_PANEL);
    let (stride, sums) = (sums.stride, sums.values.as_mut_ptr());
    // SAFETY: this function has NEON.
    let mut tile = [[unsafe { row_neon::zeros() }; P]; R];
    if accumulate {
        for (row, tile) in tile.iter_mut().enumerate() {
            for (panel, tile) in tile.iter_mut().enumerate() {
                let from = sums.wrapping_add(row * stride + panel * NARROW_PANEL);
                // SAFETY: R rows of P panels were checked above.
                *tile = unsafe { row_neon::multiply(row_neon::load(from), factor) };
            }
        }
    }
    let ahead = ahead(R, pairs, NARROW_PANEL);
    let mut pair = 0;
    for slice in a.slices::<R>(pairs) {
        for [even, odd] in slice {
            for (panel, codes) in codes.iter().enumerate() {
                // SAFETY: slices have `pairs` pairs in all, as many as each panel.
                let codes = unsafe { codes.get_unchecked(pair) };
                prefetch(codes, ahead);
                let codes = load(codes);
                // SAFETY: this function has NEON.
                unsafe {
                    let values = even_values::<E5M2>(codes);
                    for (row, tile) in tile.iter_mut().enumerate() {
                        tile[panel] = row_neon::multiply_add(tile[panel], values, even[row]);
                    }
                    let values = odd_values::<E5M2>(codes);
                    for (row, tile) in tile.iter_mut().enumerate() {
                        tile[panel] = row_neon::multiply_add(tile[panel], values, odd[row]);
                    }
                }
            }
            pair += 1;
        }
    }
    for (row, tile) in tile.iter().enumerate() {
        for (panel, &tile) in tile.iter().enumerate() {
            let to = sums.wrapping_add(row * stride + panel * NARROW_PANEL);
            // SAFETY: as for the load.
            unsafe { row_neon::store(row_neon::multiply(tile, 1. / factor), to) };
        }
    }
}

/// Packed codes of a panel, pair by pair.
fn pairs_of(codes: &[u8]) -> &[Pair] {
    let (pairs, rest) = codes.as_chunks();
    assert!(rest.is_empty(), "panels are whole pairs");
    pairs
}

#[inline]
#[target_feature(enable = "neon")]
fn load(codes: &Pair) -> [uint8x16_t; 2] {
    // SAFETY: 32 bytes.
    unsafe { [vld1q_u8(codes.as_ptr()), vld1q_u8(codes.as_ptr().add(16))] }
}

/// The values of the even sum index, columns in order.
///
/// # Safety
/// The processor must have NEON.
#[inline(always)]
unsafe fn even_values<const E5M2: bool>([left, right]: [uint8x16_t; 2]) -> Row {
    // SAFETY: the caller guarantees it.
    unsafe {
        // The even code where the odd one is.
        let left = vshlq_n_u16::<8>(vreinterpretq_u16_u8(left));
        let right = vshlq_n_u16::<8>(vreinterpretq_u16_u8(right));
        odd_values::<E5M2>([vreinterpretq_u8_u16(left), vreinterpretq_u8_u16(right)])
    }
}

/// The values of the odd sum index, columns in order.
///
/// # Safety
/// The processor must have NEON.
#[inline(always)]
unsafe fn odd_values<const E5M2: bool>([left, right]: [uint8x16_t; 2]) -> Row {
    // SAFETY: the caller guarantees it.
    unsafe {
        let ([a, b], [c, d]) = (shifted::<E5M2>(left), shifted::<E5M2>(right));
        [a, b, c, d]
    }
}

/// The values of the upper bytes of 16-bit lanes.
///
/// # Safety
/// The processor must have NEON.
#[inline(always)]
unsafe fn shifted<const E5M2: bool>(lanes: uint8x16_t) -> [float32x4_t; 2] {
    // SAFETY: the caller guarantees it.
    unsafe {
        let lanes = vreinterpretq_s16_u8(lanes);
        // Shifts copy the sign into bits that belong to the exponent.
        let halves = if E5M2 {
            vandq_s16(vshrq_n_s16::<3>(lanes), vdupq_n_s16(0x8FE0u16 as i16))
        } else {
            vandq_s16(vshrq_n_s16::<4>(lanes), vdupq_n_s16(0x87F0u16 as i16))
        };
        let zero = vdupq_n_s16(0);
        [
            vreinterpretq_f32_s16(vzip1q_s16(zero, halves)),
            vreinterpretq_f32_s16(vzip2q_s16(zero, halves)),
        ]
    }
}
