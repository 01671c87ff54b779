//! Tiles of sums: a few rows by one panel of 32 columns.

use super::super::gemm::{as_bf16, tiles};
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

/// Adds `rows x 32` sums of products of pairs of bf16; `rows` from 1 to 12.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(super) fn bf16(rows: usize, a: Rows<'_>, b: Panel<'_>, sums: Sums<'_>) {
    tiles!(rows, tile_bf16, (a, b, sums), 1 2 3 4 5 6 7 8 9 10 11 12)
}

/// Adds `rows x 32` sums of products of f32; `rows` from 1 to 12.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn avx512(rows: usize, a: Rows<'_>, b: Panel<'_>, sums: Sums<'_>) {
    tiles!(rows, tile_avx512, (a, b, sums), 1 2 3 4 5 6 7 8 9 10 11 12)
}

/// Adds `rows x 32` sums of products of f32; `rows` from 1 to 6.
#[target_feature(enable = "avx2,fma")]
pub(super) fn avx2(rows: usize, a: Rows<'_>, b: Panel<'_>, sums: Sums<'_>) {
    tiles!(rows, tile_avx2, (a, b, sums), 1 2 3 4 5 6)
}

/// A tile of `R` rows by 32 columns, as many at a time as two vectors hold.
macro_rules! tile {
    (
        $name:ident, $features:literal, $lanes:literal;
        $zero:ident, $load:ident, $store:ident;
        a: |$a:ident| $splat:expr, b: |$b:ident| $columns:expr, |$x:ident, $y:ident, $sum:ident| $multiply_add:expr
    ) => {
        #[target_feature(enable = $features)]
        fn $name<const R: usize>(a: Rows<'_>, b: Panel<'_>, sums: Sums<'_>) {
            check(R, &a, &b, &sums);
            let (row, step) = (a.row_stride, a.step_stride);
            for part in 0..PANEL / (2 * $lanes) {
                let first = part * 2 * $lanes;
                let mut tile = [[$zero(); 2]; R];
                // SAFETY: `check` has bounded the last row and the last step of each slice.
                unsafe {
                    let values = sums.values.as_mut_ptr().add(first);
                    if sums.accumulate {
                        for (r, tile) in tile.iter_mut().enumerate() {
                            tile[0] = $load(values.add(r * sums.stride));
                            tile[1] = $load(values.add(r * sums.stride + $lanes));
                        }
                    }
                    let (mut a, mut b_at) =
                        (a.cells.as_ptr(), b.cells.as_ptr().wrapping_add(first));
                    for _ in 0..b.steps {
                        let $b = b_at;
                        let left = $columns;
                        let $b = b_at.add($lanes);
                        let right = $columns;
                        for (r, tile) in tile.iter_mut().enumerate() {
                            let $a = a.add(r * row);
                            let $x = $splat;
                            let ($y, $sum) = (left, tile[0]);
                            tile[0] = $multiply_add;
                            let ($y, $sum) = (right, tile[1]);
                            tile[1] = $multiply_add;
                        }
                        a = a.wrapping_add(step);
                        b_at = b_at.wrapping_add(b.stride);
                    }
                    for (r, tile) in tile.iter().enumerate() {
                        $store(values.add(r * sums.stride), tile[0]);
                        $store(values.add(r * sums.stride + $lanes), tile[1]);
                    }
                }
            }
        }
    };
}
tile! {
    tile_bf16, "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16", 16;
    _mm512_setzero_ps, _mm512_loadu_ps, _mm512_storeu_ps;
    a: |a| as_bf16(_mm512_set1_epi32(a.cast::<i32>().read())),
    b: |b| as_bf16(_mm512_loadu_si512(b.cast())),
    |a, b, sum| _mm512_dpbf16_ps(sum, a, b)
}
tile! {
    tile_avx512, "avx512f,avx512bw,avx512vl,avx512dq", 16;
    _mm512_setzero_ps, _mm512_loadu_ps, _mm512_storeu_ps;
    a: |a| _mm512_set1_ps(a.cast::<f32>().read()),
    b: |b| _mm512_loadu_ps(b.cast()),
    |a, b, sum| _mm512_fmadd_ps(a, b, sum)
}
tile! {
    tile_avx2, "avx2,fma", 8;
    _mm256_setzero_ps, _mm256_loadu_ps, _mm256_storeu_ps;
    a: |a| _mm256_set1_ps(a.cast::<f32>().read()),
    b: |b| _mm256_loadu_ps(b.cast()),
    |a, b, sum| _mm256_fmadd_ps(a, b, sum)
}
