//! Tiles of sums with `vdpbf16ps`: up to [`ROWS`] rows by one panel of 32 columns, in 24 registers.

use super::kernel::Sums;
use super::layout::{PANEL, SLICE_STRIDE};
use super::pack_bf16::{Decoder, prefetch};
use std::arch::x86_64::*;

/// Rows of a tile.
pub(super) const ROWS: usize = 12;

/// One panel, and how its columns are summed.
#[derive(Clone, Copy)]
pub(super) enum Columns<'a> {
    /// Packed as B.
    Values(&'a [u16]),
    /// Packed as B, for a product of no more rows than a tile: several sums for each element, as for packed codes.
    FewValues(&'a [u16]),
    /// Packed codes, decoded here: for so few rows that the values are needed only once.
    FewPacked(&'a [u8]),
}

/// Computes the `rows x 32` sums, or adds to them.
///
/// `a`: rows of a slice packed as A, from the first index of the sum on; `columns`: one panel from that index on, whose
/// length is that of the sum.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni,avx512bf16")]
pub(super) fn multiply(
    decoder: &Decoder,
    rows: usize,
    a: &[u16],
    columns: Columns<'_>,
    sums: Sums<'_>,
    accumulate: bool,
) {
    macro_rules! tile {
        ($($rows:literal)+) => {
            match rows {
                $($rows => of_rows::<$rows>(decoder, a, columns, sums, accumulate),)+
                _ => unreachable!("a tile of {rows} rows"),
            }
        };
    }
    tile!(1 2 3 4 5 6 7 8 9 10 11 12)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni,avx512bf16")]
fn of_rows<const R: usize>(
    decoder: &Decoder,
    a: &[u16],
    columns: Columns<'_>,
    sums: Sums<'_>,
    accumulate: bool,
) {
    // A few rows need several sums each to hide the latency of the instruction. Packed codes are summed like values.
    let unrolled = match R {
        ..=2 => 4,
        3..=6 => 2,
        _ => 1,
    };
    match (columns, unrolled) {
        (Columns::Values(b), _) | (Columns::FewValues(b), 1) => {
            tile::<R, 1, false>(decoder, a, bytes(b), sums, accumulate);
        }
        (Columns::FewValues(b), 2) => {
            tile::<R, 2, false>(decoder, a, bytes(b), sums, accumulate);
        }
        (Columns::FewValues(b), _) => {
            tile::<R, 4, false>(decoder, a, bytes(b), sums, accumulate);
        }
        (Columns::FewPacked(codes), 1) => {
            tile::<R, 1, true>(decoder, a, codes, sums, accumulate);
        }
        (Columns::FewPacked(codes), 2) => {
            tile::<R, 2, true>(decoder, a, codes, sums, accumulate);
        }
        (Columns::FewPacked(codes), _) => {
            tile::<R, 4, true>(decoder, a, codes, sums, accumulate);
        }
    }
}

/// The bytes of values in memory.
fn bytes(values: &[u16]) -> &[u8] {
    // SAFETY: memory of u16 is memory of twice as many bytes.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), 2 * values.len()) }
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
    // SAFETY: both have 64 bytes, and any bits are a valid value.
    unsafe { std::mem::transmute(bits) }
}

/// Panics if `a` does not hold `R` rows of `pairs` pairs.
fn check_rows<const R: usize>(a: &[u16], pairs: usize) {
    assert!(R > 0 && a.len() >= (R - 1) * SLICE_STRIDE + 2 * pairs);
}

/// `U` interleaved sums for each element, which are added at the end. `b`: values, or codes where `PACKED`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni,avx512bf16")]
fn tile<const R: usize, const U: usize, const PACKED: bool>(
    decoder: &Decoder,
    a: &[u16],
    b: &[u8],
    sums: Sums<'_>,
    accumulate: bool,
) {
    let pair_bytes = if PACKED { 2 * PANEL } else { 4 * PANEL };
    let pairs = b.len() / pair_bytes;
    check_rows::<R>(a, pairs);
    let mut tiles = [[[_mm512_setzero_ps(); 2]; R]; U];
    tiles[0] = start::<R>(&sums, accumulate);
    // The length of a sum is a multiple of 32, so of U pairs.
    for group in 0..pairs / U {
        for (unrolled, tile) in tiles.iter_mut().enumerate() {
            let pair = group * U + unrolled;
            // SAFETY: `pair` is below the number of pairs that `b` holds, each of one vector if packed, otherwise of two.
            let (left, right) = unsafe {
                let b = b.as_ptr().add(pair * pair_bytes);
                if PACKED {
                    prefetch(b, 8192);
                    decoder.decode(_mm512_loadu_si512(b.cast()))
                } else {
                    (
                        _mm512_loadu_si512(b.cast()),
                        _mm512_loadu_si512(b.add(2 * PANEL).cast()),
                    )
                }
            };
            for (row, tile) in tile.iter_mut().enumerate() {
                let a = broadcast::<R>(a, pair, row);
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
