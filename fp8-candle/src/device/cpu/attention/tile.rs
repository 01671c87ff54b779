//! Tiles of sums: a few rows by one panel of 32 columns.

use super::layout::{PANEL, Panel, Rows, Sums};
use std::arch::x86_64::*;

/// Panics if the slices do not hold a tile of `rows` rows.
#[inline]
fn check(rows: usize, a: &Rows<'_>, b: &Panel<'_>, sums: &Sums<'_>) {
    if b.steps > 0 {
        let last = b.steps - 1;
        assert!((rows - 1) * a.row_stride + last * a.step_stride < a.cells.len());
        assert!(last * b.stride + PANEL <= b.cells.len());
    }
    assert!((rows - 1) * sums.stride + PANEL <= sums.values.len());
}

macro_rules! of_rows {
    ($rows:expr, $tile:ident, $arguments:tt, $($count:literal)+) => {
        match $rows {
            $($count => $tile::<$count> $arguments,)+
            rows => unreachable!("a tile of {rows} rows"),
        }
    };
}

/// Adds `rows x 32` sums of products of pairs of bf16; `rows` from 1 to 12.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(super) fn bf16(rows: usize, a: Rows<'_>, b: Panel<'_>, sums: Sums<'_>) {
    of_rows!(rows, tile_bf16, (a, b, sums), 1 2 3 4 5 6 7 8 9 10 11 12)
}

/// Adds `rows x 32` sums of products of f32; `rows` from 1 to 12.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn avx512(rows: usize, a: Rows<'_>, b: Panel<'_>, sums: Sums<'_>) {
    of_rows!(rows, tile_avx512, (a, b, sums), 1 2 3 4 5 6 7 8 9 10 11 12)
}

/// Adds `rows x 32` sums of products of f32; `rows` from 1 to 6.
#[target_feature(enable = "avx2,fma")]
pub(super) fn avx2(rows: usize, a: Rows<'_>, b: Panel<'_>, sums: Sums<'_>) {
    of_rows!(rows, tile_avx2, (a, b, sums), 1 2 3 4 5 6)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn as_bf16(bits: __m512i) -> __m512bh {
    // SAFETY: both have 64 bytes, and any bits are a valid value.
    unsafe { std::mem::transmute(bits) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn tile_bf16<const R: usize>(a: Rows<'_>, b: Panel<'_>, sums: Sums<'_>) {
    check(R, &a, &b, &sums);
    let (row, step) = (a.row_stride, a.step_stride);
    let values = sums.values.as_mut_ptr();
    let mut tile = [[_mm512_setzero_ps(); 2]; R];
    // SAFETY: `check` has bounded the last row and the last step of each slice.
    unsafe {
        if sums.accumulate {
            for (r, tile) in tile.iter_mut().enumerate() {
                tile[0] = _mm512_loadu_ps(values.add(r * sums.stride));
                tile[1] = _mm512_loadu_ps(values.add(r * sums.stride + 16));
            }
        }
        let (mut a, mut b_at) = (a.cells.as_ptr(), b.cells.as_ptr());
        for _ in 0..b.steps {
            let left = as_bf16(_mm512_loadu_si512(b_at.cast()));
            let right = as_bf16(_mm512_loadu_si512(b_at.add(16).cast()));
            for (r, tile) in tile.iter_mut().enumerate() {
                let a = as_bf16(_mm512_set1_epi32(a.add(r * row).cast::<i32>().read()));
                tile[0] = _mm512_dpbf16_ps(tile[0], a, left);
                tile[1] = _mm512_dpbf16_ps(tile[1], a, right);
            }
            a = a.wrapping_add(step);
            b_at = b_at.wrapping_add(b.stride);
        }
        for (r, tile) in tile.iter().enumerate() {
            _mm512_storeu_ps(values.add(r * sums.stride), tile[0]);
            _mm512_storeu_ps(values.add(r * sums.stride + 16), tile[1]);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn tile_avx512<const R: usize>(a: Rows<'_>, b: Panel<'_>, sums: Sums<'_>) {
    check(R, &a, &b, &sums);
    let (row, step) = (a.row_stride, a.step_stride);
    let values = sums.values.as_mut_ptr();
    let mut tile = [[_mm512_setzero_ps(); 2]; R];
    // SAFETY: `check` has bounded the last row and the last step of each slice.
    unsafe {
        if sums.accumulate {
            for (r, tile) in tile.iter_mut().enumerate() {
                tile[0] = _mm512_loadu_ps(values.add(r * sums.stride));
                tile[1] = _mm512_loadu_ps(values.add(r * sums.stride + 16));
            }
        }
        let (mut a, mut b_at) = (a.cells.as_ptr(), b.cells.as_ptr());
        for _ in 0..b.steps {
            let left = _mm512_loadu_ps(b_at.cast());
            let right = _mm512_loadu_ps(b_at.add(16).cast());
            for (r, tile) in tile.iter_mut().enumerate() {
                let a = _mm512_set1_ps(a.add(r * row).cast::<f32>().read());
                tile[0] = _mm512_fmadd_ps(a, left, tile[0]);
                tile[1] = _mm512_fmadd_ps(a, right, tile[1]);
            }
            a = a.wrapping_add(step);
            b_at = b_at.wrapping_add(b.stride);
        }
        for (r, tile) in tile.iter().enumerate() {
            _mm512_storeu_ps(values.add(r * sums.stride), tile[0]);
            _mm512_storeu_ps(values.add(r * sums.stride + 16), tile[1]);
        }
    }
}

#[target_feature(enable = "avx2,fma")]
fn tile_avx2<const R: usize>(a: Rows<'_>, b: Panel<'_>, sums: Sums<'_>) {
    check(R, &a, &b, &sums);
    let (row, step) = (a.row_stride, a.step_stride);
    for half in [0, PANEL / 2] {
        let mut tile = [[_mm256_setzero_ps(); 2]; R];
        // SAFETY: `check` has bounded the last row and the last step of each slice.
        unsafe {
            let values = sums.values.as_mut_ptr().add(half);
            if sums.accumulate {
                for (r, tile) in tile.iter_mut().enumerate() {
                    tile[0] = _mm256_loadu_ps(values.add(r * sums.stride));
                    tile[1] = _mm256_loadu_ps(values.add(r * sums.stride + 8));
                }
            }
            let (mut a, mut b_at) = (a.cells.as_ptr(), b.cells.as_ptr().wrapping_add(half));
            for _ in 0..b.steps {
                let left = _mm256_loadu_ps(b_at.cast());
                let right = _mm256_loadu_ps(b_at.add(8).cast());
                for (r, tile) in tile.iter_mut().enumerate() {
                    let a = _mm256_set1_ps(a.add(r * row).cast::<f32>().read());
                    tile[0] = _mm256_fmadd_ps(a, left, tile[0]);
                    tile[1] = _mm256_fmadd_ps(a, right, tile[1]);
                }
                a = a.wrapping_add(step);
                b_at = b_at.wrapping_add(b.stride);
            }
            for (r, tile) in tile.iter().enumerate() {
                _mm256_storeu_ps(values.add(r * sums.stride), tile[0]);
                _mm256_storeu_ps(values.add(r * sums.stride + 8), tile[1]);
            }
        }
    }
}
