//! Tiles of sums by `vdpbf16ps`: up to [`ROWS`] rows by one panel of 32 columns, in 24 registers.

use super::kernel::Sums;
use super::layout::{PANEL, SLICE_STRIDE};
use super::pack_bf16::{Decoder, prefetch};
use std::arch::x86_64::*;

/// Rows of a tile.
pub(super) const ROWS: usize = 12;

/// What a tile's columns come from.
#[derive(Clone, Copy)]
pub(super) enum Columns<'a> {
    /// B's form.
    Values(&'a [u16]),
    /// Packed codes, decoded on the way: for so few rows that no one else needs the values.
    Packed(&'a Decoder, &'a [u8]),
}

/// Adds to (or begins with zero) the `rows x 32` sums.
///
/// `a`: rows of a slice in A's form, from the sum's first index on; `columns`: one panel from that index on, whose
/// length is that of the sum.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni,avx512bf16")]
pub(super) fn multiply(
    rows: usize,
    a: &[u16],
    columns: Columns<'_>,
    sums: Sums<'_>,
    accumulate: bool,
) {
    macro_rules! tile {
        ($($rows:literal)+) => {
            match rows {
                $($rows => tile::<$rows>(a, columns, sums, accumulate),)+
                _ => unreachable!("a tile of {rows} rows"),
            }
        };
    }
    tile!(1 2 3 4 5 6 7 8 9 10 11 12)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni,avx512bf16")]
fn tile<const R: usize>(a: &[u16], columns: Columns<'_>, sums: Sums<'_>, accumulate: bool) {
    match columns {
        Columns::Values(b) => tile_values::<R>(a, b, sums, accumulate),
        // A few rows need several sums each to hide the latency of the instruction.
        Columns::Packed(decoder, codes) if R <= 2 => {
            tile_packed::<R, 4>(decoder, a, codes, sums, accumulate);
        }
        Columns::Packed(decoder, codes) if R <= 6 => {
            tile_packed::<R, 2>(decoder, a, codes, sums, accumulate);
        }
        Columns::Packed(decoder, codes) => {
            tile_packed::<R, 1>(decoder, a, codes, sums, accumulate);
        }
    }
}

/// Two neighbours of each of `R` rows, for all columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni,avx512bf16")]
fn broadcast<const R: usize>(a: &[u16], pair: usize, row: usize) -> __m512bh {
    debug_assert!(row * SLICE_STRIDE + 2 * pair + 1 < a.len());
    // SAFETY: the callers have checked that `a` holds `R` rows of the length of the sum.
    let pair = unsafe {
        a.as_ptr()
            .add(row * SLICE_STRIDE + 2 * pair)
            .cast::<i32>()
            .read_unaligned()
    };
    as_bf16(_mm512_set1_epi32(pair))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni,avx512bf16")]
fn as_bf16(bits: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes that any bits are a value of.
    unsafe { std::mem::transmute(bits) }
}

/// Panics where `a` does not hold `R` rows of `pairs` pairs.
fn check_rows<const R: usize>(a: &[u16], pairs: usize) {
    assert!(R > 0 && a.len() >= (R - 1) * SLICE_STRIDE + 2 * pairs);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni,avx512bf16")]
fn tile_values<const R: usize>(a: &[u16], b: &[u16], sums: Sums<'_>, accumulate: bool) {
    let (pairs, _) = b.as_chunks::<{ 2 * PANEL }>();
    check_rows::<R>(a, pairs.len());
    let mut tile = start::<R>(&sums, accumulate);
    for (pair, b) in pairs.iter().enumerate() {
        // SAFETY: the chunk holds 64 elements of 16 bits, two vectors.
        let b = unsafe {
            [
                as_bf16(_mm512_loadu_si512(b.as_ptr().cast())),
                as_bf16(_mm512_loadu_si512(b.as_ptr().add(PANEL).cast())),
            ]
        };
        for (row, tile) in tile.iter_mut().enumerate() {
            let a = broadcast::<R>(a, pair, row);
            tile[0] = _mm512_dpbf16_ps(tile[0], a, b[0]);
            tile[1] = _mm512_dpbf16_ps(tile[1], a, b[1]);
        }
    }
    finish(tile, sums);
}

/// `U` interleaved sums for each element, which are added at the end.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni,avx512bf16")]
fn tile_packed<const R: usize, const U: usize>(
    decoder: &Decoder,
    a: &[u16],
    codes: &[u8],
    sums: Sums<'_>,
    accumulate: bool,
) {
    let (pairs, _) = codes.as_chunks::<{ 2 * PANEL }>();
    check_rows::<R>(a, pairs.len());
    let mut tiles = [[[_mm512_setzero_ps(); 2]; R]; U];
    tiles[0] = start::<R>(&sums, accumulate);
    // The length of a sum is a multiple of 32, so of U pairs.
    for (group, codes) in pairs.chunks_exact(U).enumerate() {
        for (unrolled, tile) in tiles.iter_mut().enumerate() {
            prefetch(&codes[unrolled], 8192);
            // SAFETY: the chunk holds 64 bytes, one vector.
            let codes = unsafe { _mm512_loadu_si512(codes[unrolled].as_ptr().cast()) };
            let (left, right) = decoder.decode(codes);
            for (row, tile) in tile.iter_mut().enumerate() {
                let a = broadcast::<R>(a, group * U + unrolled, row);
                tile[0] = _mm512_dpbf16_ps(tile[0], a, as_bf16(left));
                tile[1] = _mm512_dpbf16_ps(tile[1], a, as_bf16(right));
            }
        }
    }
    let mut tile = tiles[0];
    for other in &tiles[1..] {
        for row in 0..R {
            for half in 0..2 {
                tile[row][half] = _mm512_add_ps(tile[row][half], other[row][half]);
            }
        }
    }
    finish(tile, sums);
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni,avx512bf16")]
fn start<const R: usize>(sums: &Sums<'_>, accumulate: bool) -> [[__m512; 2]; R] {
    let mut tile = [[_mm512_setzero_ps(); 2]; R];
    if accumulate {
        for (row, tile) in tile.iter_mut().enumerate() {
            let sums: &[f32; PANEL] = sums.values[row * sums.stride..]
                .first_chunk()
                .expect("a row of sums");
            // SAFETY: the chunk holds 32 sums, two vectors.
            unsafe {
                tile[0] = _mm512_loadu_ps(sums.as_ptr());
                tile[1] = _mm512_loadu_ps(sums.as_ptr().add(16));
            }
        }
    }
    tile
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni,avx512bf16")]
fn finish<const R: usize>(tile: [[__m512; 2]; R], sums: Sums<'_>) {
    for (row, tile) in tile.iter().enumerate() {
        let sums: &mut [f32; PANEL] = sums.values[row * sums.stride..]
            .first_chunk_mut()
            .expect("a row of sums");
        // SAFETY: the chunk holds 32 sums, two vectors.
        unsafe {
            _mm512_storeu_ps(sums.as_mut_ptr(), tile[0]);
            _mm512_storeu_ps(sums.as_mut_ptr().add(16), tile[1]);
        }
    }
}
