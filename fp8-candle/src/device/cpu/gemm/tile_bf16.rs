//! Tiles of sums with `vdpbf16ps`: up to [`ROWS`] rows by one panel of 32 columns, or few rows by several panels, in up to 24
//! registers.

use super::decoder::{Decoder, added_to_pairs, prefetch};
use super::kernel::{PackedPanel, Sums};
use super::layout::{DEPTH, PANEL, ROWS_STEP, SLICE_STRIDE};
use super::prefetch::Ahead;
use super::results::Block;
use std::arch::x86_64::*;

/// Rows of a tile.
pub(super) const ROWS: usize = 12;

/// The height of the tile that begins at row `row` of `rows`. Each run of [`ROWS_STEP`] rows is cut independently of the rows
/// after it.
///
/// The last two tiles have about the same height: a full tile and one of few rows would take longer, as few rows wait for
/// their own sums.
pub(super) fn height(row: usize, rows: usize) -> usize {
    let left = rows.min((row / ROWS_STEP + 1) * ROWS_STEP) - row;
    if left > ROWS && left < ROWS + ROWS / 2 {
        left.div_ceil(2)
    } else {
        left.min(ROWS)
    }
}

/// Rows of one slice packed as A.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) values: &'a [u16],
    /// The first index of the sum within the slice.
    pub(super) skip: usize,
    /// In tiles of pairs, see `layout.rs`; not for a product of few rows.
    pub(super) pairs: bool,
}

/// What a tile does with its sums.
pub(super) struct To<'a, 'b> {
    /// Where they are kept from slice to slice.
    pub(super) sums: Sums<'a>,
    /// Add to the existing values instead of starting with zero.
    pub(super) accumulate: bool,
    /// After the last slice: where the results go, instead of the sums.
    pub(super) results: Option<Block<'b>>,
    /// What is fetched beside, unless the columns are packed codes.
    pub(super) ahead: Ahead,
}

/// The columns of a tile.
#[derive(Clone, Copy)]
pub(super) enum Columns<'a> {
    /// One panel, packed as B.
    Values(&'a [u16]),
    /// Packed codes of neighbouring panels, as many as [`panels_at_once`] says at most, decoded here: for so few rows that the values
    /// are needed only once.
    Packed(&'a [PackedPanel<'a>]),
}

/// How many panels of packed codes are summed at a time for tiles of `rows` rows, to hide the latency of additions. Each sum has
/// one order all the same.
pub(super) const fn panels_at_once(rows: usize) -> usize {
    match rows {
        1 => 4,
        2 => 3,
        3 => 2,
        _ => 1,
    }
}

/// Computes the sums of `rows` rows by some panels of 32 columns, or adds to them. Each is summed in the order of the indices.
///
/// `columns`: panels from the first index of the sum on, whose length is that of the sum.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni,avx512bf16")]
pub(super) fn multiply(
    decoder: &Decoder,
    rows: usize,
    a: Rows<'_>,
    columns: Columns<'_>,
    to: To<'_, '_>,
) {
    macro_rules! values {
        ($b:ident: $($rows:literal)+) => {
            match (rows, a.pairs) {
                $(
                    ($rows, false) => tile::<$rows, 1, false, false, false>(decoder, a, [values($b)], to),
                    ($rows, true) => tile::<$rows, 1, false, true, false>(decoder, a, [values($b)], to),
                )+
                _ => unreachable!("a tile of {rows} rows"),
            }
        };
    }
    macro_rules! packed {
        ($codes:ident: $($rows:literal x $panels:literal)+) => {
            match (rows, $codes.len()) {
                $(
                    ($rows, $panels) => {
                        let panels: [_; $panels] = std::array::from_fn(|panel| $codes[panel]);
                        if panels[0].added.is_empty() {
                            tile::<$rows, $panels, true, false, false>(decoder, a, panels, to);
                        } else {
                            tile::<$rows, $panels, true, false, true>(decoder, a, panels, to);
                        }
                    }
                )+
                (rows, panels) => unreachable!("a tile of {rows} rows by {panels} panels"),
            }
        };
    }
    match columns {
        Columns::Values(b) => values!(b: 1 2 3 4 5 6 7 8 9 10 11 12),
        Columns::Packed(codes) => packed!(
            codes: 1 x 1 1 x 2 1 x 3 1 x 4 2 x 1 2 x 2 2 x 3 3 x 1 3 x 2
            4 x 1 5 x 1 6 x 1 7 x 1 8 x 1 9 x 1 10 x 1 11 x 1 12 x 1
        ),
    }
}

/// A panel of values, with their bytes in place of codes.
fn values(values: &[u16]) -> PackedPanel<'_> {
    PackedPanel {
        // SAFETY: memory of u16 is memory of twice as many bytes.
        codes: unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), 2 * values.len()) },
        added: &[],
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(in super::super) fn as_bf16(bits: __m512i) -> __m512bh {
    // SAFETY: both have 64 bytes, and any bits are a valid value.
    unsafe { std::mem::transmute(bits) }
}

/// The elements of A between neighbouring rows and between neighbouring pairs of a tile of `R` rows.
const fn strides<const R: usize, const PAIRS: bool>() -> (usize, usize) {
    if PAIRS { (2, 2 * R) } else { (SLICE_STRIDE, 2) }
}

/// `R` rows by `P` neighbouring panels. `panels`: values, or codes where `PACKED`, to whose exponents something is added where
/// `SCALED`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni,avx512bf16")]
fn tile<
    const R: usize,
    const P: usize,
    const PACKED: bool,
    const PAIRS: bool,
    const SCALED: bool,
>(
    decoder: &Decoder,
    a: Rows<'_>,
    panels: [PackedPanel<'_>; P],
    mut to: To<'_, '_>,
) {
    // By index, not `map`, which would be compiled once more for each tile.
    let mut b = [panels[0].codes; P];
    for panel in 1..P {
        b[panel] = panels[panel].codes;
    }
    let pair_bytes = if PACKED { 2 * PANEL } else { 4 * PANEL };
    let pairs = b[0].len() / pair_bytes;
    let (row_stride, pair_stride) = strides::<R, PAIRS>();
    let a = &a.values[a.skip / 2 * pair_stride..];
    assert!(R > 0 && pairs > 0 && b.iter().all(|b| b.len() / pair_bytes == pairs));
    assert!((R - 1) * row_stride + (pairs - 1) * pair_stride + 2 <= a.len());
    if let Some(results) = &to.results {
        results.prefetch(0..R);
    }
    let mut tiles = [[[_mm512_setzero_ps(); 2]; R]; P];
    if to.accumulate {
        for (panel, tile) in tiles.iter_mut().enumerate() {
            start::<R, P, PACKED, PAIRS, SCALED>(&to.sums, panel, tile);
        }
    }
    let mut added = [[_mm512_setzero_si512(); 2]; P];
    for pair in 0..pairs {
        if SCALED && pair.is_multiple_of(DEPTH / 2) {
            for (panel, added) in panels.iter().zip(&mut added) {
                *added = added_to_pairs(panel.added_at(pair / (DEPTH / 2)));
            }
        }
        if !PACKED {
            to.ahead.fetch_line(pair);
        }
        for (panel, tile) in tiles.iter_mut().enumerate() {
            // SAFETY: `pair` is below the number of pairs that each panel holds, each of one vector if packed, otherwise of two.
            let (left, right) = unsafe {
                let b = b[panel].as_ptr().add(pair * pair_bytes);
                if PACKED {
                    prefetch(b, AHEAD / P);
                    let codes = _mm512_loadu_si512(b.cast());
                    match SCALED {
                        true => decoder.decode_scaled(codes, added[panel]),
                        false => decoder.decode(codes),
                    }
                } else {
                    (
                        _mm512_loadu_si512(b.cast()),
                        _mm512_loadu_si512(b.add(2 * PANEL).cast()),
                    )
                }
            };
            for (row, tile) in tile.iter_mut().enumerate() {
                // SAFETY: within `a` by the assertion on the last row and pair.
                let a = unsafe { a.as_ptr().add(row * row_stride + pair * pair_stride) };
                // SAFETY: as above; the pair is two elements.
                let a = as_bf16(_mm512_set1_epi32(unsafe {
                    a.cast::<i32>().read_unaligned()
                }));
                tile[0] = _mm512_dpbf16_ps(tile[0], a, as_bf16(left));
                tile[1] = _mm512_dpbf16_ps(tile[1], a, as_bf16(right));
            }
        }
    }
    for (panel, tile) in tiles.into_iter().enumerate() {
        match to.results {
            Some(results) => results
                .at(0, panel * PANEL)
                .write::<R, P, PACKED, PAIRS, SCALED>(tile),
            None => keep::<R, P, PACKED, PAIRS, SCALED>(tile, panel, &mut to.sums),
        }
    }
}

/// How far ahead of packed codes tiles prefetch, in all panels together.
const AHEAD: usize = 8192;

/// Loads sums. The parameters give each instance a single caller, so that it is inlined and the sums stay in registers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni,avx512bf16")]
fn start<
    const R: usize,
    const P: usize,
    const PACKED: bool,
    const PAIRS: bool,
    const SCALED: bool,
>(
    sums: &Sums<'_>,
    panel: usize,
    tile: &mut [[__m512; 2]; R],
) {
    for (row, tile) in tile.iter_mut().enumerate() {
        let sums: &[f32; PANEL] = sums.values[row * sums.stride + panel * PANEL..]
            .first_chunk()
            .expect("a row of sums");
        // SAFETY: the chunk holds 32 sums, two vectors.
        unsafe {
            tile[0] = _mm512_loadu_ps(sums.as_ptr());
            tile[1] = _mm512_loadu_ps(sums.as_ptr().add(16));
        }
    }
}

/// Stores sums; for the parameters see [`start`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni,avx512bf16")]
fn keep<
    const R: usize,
    const P: usize,
    const PACKED: bool,
    const PAIRS: bool,
    const SCALED: bool,
>(
    tile: [[__m512; 2]; R],
    panel: usize,
    sums: &mut Sums<'_>,
) {
    for (row, tile) in tile.iter().enumerate() {
        let sums: &mut [f32; PANEL] = sums.values[row * sums.stride + panel * PANEL..]
            .first_chunk_mut()
            .expect("a row of sums");
        // SAFETY: the chunk holds 32 sums, two vectors.
        unsafe {
            _mm512_storeu_ps(sums.as_mut_ptr(), tile[0]);
            _mm512_storeu_ps(sums.as_mut_ptr().add(16), tile[1]);
        }
    }
}
