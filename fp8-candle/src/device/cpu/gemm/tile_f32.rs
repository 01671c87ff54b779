//! Tiles of sums with f32 multiply-adds: twelve rows by one panel of 32 columns for AVX-512, six by half a panel for AVX2.

use super::kernel::Sums;
use super::layout::{PANEL, SLICE_STRIDE};
use std::arch::x86_64::*;

/// Rows of a tile.
pub(super) const ROWS_AVX512: usize = 12;

/// Rows of a tile.
pub(super) const ROWS_AVX2: usize = 6;

macro_rules! tiles {
    ($rows:expr, $tile:ident, $arguments:tt, $($count:literal)+) => {
        match $rows {
            $($count => $tile::<$count> $arguments,)+
            rows => unreachable!("a tile of {rows} rows"),
        }
    };
}

/// Computes the `rows x 32` sums, or adds to them.
///
/// `a`: rows of a slice packed as A, from the first index of the sum on; `b`: one panel from that index on, whose length is
/// that of the sum.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn avx512(rows: usize, a: &[f32], b: &[f32], sums: Sums<'_>, accumulate: bool) {
    tiles!(rows, tile_avx512, (a, b, sums, accumulate), 1 2 3 4 5 6 7 8 9 10 11 12)
}

/// As [`avx512`], for the left (0) or right (1) `half` of the columns.
#[target_feature(enable = "avx2,fma")]
pub(super) fn avx2(
    rows: usize,
    a: &[f32],
    b: &[f32],
    half: usize,
    sums: Sums<'_>,
    accumulate: bool,
) {
    tiles!(rows, tile_avx2, (a, b, half, sums, accumulate), 1 2 3 4 5 6)
}

/// Panics if the slices do not hold a tile of `R` rows; returns the rows of `b`.
fn check<'b, const R: usize>(a: &[f32], b: &'b [f32], sums: &Sums<'_>) -> &'b [[f32; PANEL]] {
    let (b, _) = b.as_chunks::<PANEL>();
    assert!(R > 0 && a.len() >= (R - 1) * SLICE_STRIDE + b.len());
    assert!(sums.values.len() >= (R - 1) * sums.stride + PANEL);
    b
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn tile_avx512<const R: usize>(a: &[f32], b: &[f32], sums: Sums<'_>, accumulate: bool) {
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

#[target_feature(enable = "avx2,fma")]
fn tile_avx2<const R: usize>(a: &[f32], b: &[f32], half: usize, sums: Sums<'_>, accumulate: bool) {
    let b = check::<R>(a, b, &sums);
    assert!(half < 2);
    let half = half * PANEL / 2;
    let (a, stride) = (a.as_ptr(), sums.stride);
    let mut tile = [[_mm256_setzero_ps(); 2]; R];
    // SAFETY: `check` has bounded the rows of `a` and `sums`; half a row of `b` is two vectors.
    unsafe {
        let sums = sums.values.as_mut_ptr().add(half);
        if accumulate {
            for (row, tile) in tile.iter_mut().enumerate() {
                tile[0] = _mm256_loadu_ps(sums.add(row * stride));
                tile[1] = _mm256_loadu_ps(sums.add(row * stride + 8));
            }
        }
        for (index, b) in b.iter().enumerate() {
            let b = b.as_ptr().add(half);
            let b = [_mm256_loadu_ps(b), _mm256_loadu_ps(b.add(8))];
            for (row, tile) in tile.iter_mut().enumerate() {
                let a = _mm256_set1_ps(*a.add(row * SLICE_STRIDE + index));
                tile[0] = _mm256_fmadd_ps(a, b[0], tile[0]);
                tile[1] = _mm256_fmadd_ps(a, b[1], tile[1]);
            }
        }
        for (row, tile) in tile.iter().enumerate() {
            _mm256_storeu_ps(sums.add(row * stride), tile[0]);
            _mm256_storeu_ps(sums.add(row * stride + 8), tile[1]);
        }
    }
}
