//! Tiles of sums with f32 multiply-adds of AVX-512: twelve rows by one panel of 32 columns.

use super::kernel::Sums;
use super::layout::{PANEL, SLICE_STRIDE};
use std::arch::x86_64::*;

/// Rows of a tile.
pub(super) const ROWS: usize = 12;

macro_rules! tiles {
    ($rows:expr, $tile:ident, $arguments:tt, $($count:literal)+) => {
        match $rows {
            $($count => $tile::<$count> $arguments,)+
            rows => unreachable!("a tile of {rows} rows"),
        }
    };
}
pub(super) use tiles;

/// Computes the `rows x 32` sums, or adds to them.
///
/// `a`: rows of a slice packed as A, from the first index of the sum on; `b`: one panel from that index on, whose length is
/// that of the sum.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn multiply(rows: usize, a: &[f32], b: &[f32], sums: Sums<'_>, accumulate: bool) {
    tiles!(rows, tile, (a, b, sums, accumulate), 1 2 3 4 5 6 7 8 9 10 11 12)
}

/// Panics if the slices do not hold a tile of `R` rows; returns the rows of `b`.
fn check<'b, const R: usize>(a: &[f32], b: &'b [f32], sums: &Sums<'_>) -> &'b [[f32; PANEL]] {
    let (b, _) = b.as_chunks::<PANEL>();
    assert!(R > 0 && a.len() >= (R - 1) * SLICE_STRIDE + b.len());
    assert!(sums.values.len() >= (R - 1) * sums.stride + PANEL);
    b
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn tile<const R: usize>(a: &[f32], b: &[f32], sums: Sums<'_>, accumulate: bool) {
    let b = check::<R>(a, b, &sums);
    let (a, stride, sums) = (a.as_ptr(), sums.stride, sums.values.as_mut_ptr());
    let mut tile = [[_mm512_setzero_ps(); 2]; R];
    // SAFETY: `check` has bounded the rows of `a` and `sums`; a row of `b` is two vectors.
    unsafe {
        if accumulate {
            for (row, tile) in tile.iter_mut().enumerate() {
                tile[0] = _mm512_loadu_ps(sums.add(row * stride));
                tile[1] = _mm512_loadu_ps(sums.add(row * stride + 16));
            }
        }
        for (index, b) in b.iter().enumerate() {
            let b = [
                _mm512_loadu_ps(b.as_ptr()),
                _mm512_loadu_ps(b.as_ptr().add(16)),
            ];
            for (row, tile) in tile.iter_mut().enumerate() {
                let a = _mm512_set1_ps(*a.add(row * SLICE_STRIDE + index));
                tile[0] = _mm512_fmadd_ps(a, b[0], tile[0]);
                tile[1] = _mm512_fmadd_ps(a, b[1], tile[1]);
            }
        }
        for (row, tile) in tile.iter().enumerate() {
            _mm512_storeu_ps(sums.add(row * stride), tile[0]);
            _mm512_storeu_ps(sums.add(row * stride + 16), tile[1]);
        }
    }
}
