//! Tiles of sums with f32 multiply-adds of AVX2: six rows by one panel of 16 columns.

use super::engine_f32::{Tiles, tiles};
use super::kernel::Sums;
use super::layout::{NARROW_PANEL, Order};
use super::packed_avx2;
use fp8_core::{Format, IsaLevel};
use std::arch::x86_64::*;

/// AVX2 with FMA and F16C.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Avx2;

// SAFETY: the level is AVX2 with FMA and F16C.
unsafe impl Tiles for Avx2 {
    const LEVEL: IsaLevel = IsaLevel::Avx2;
    const ORDER: Order = Order::NarrowColumns;
    // Twelve sums, two vectors of B and one of A: fifteen of sixteen registers.
    const ROWS: usize = 6;
    const TASK_SIZE: (usize, usize) = (192, 16);
    const PACKED_ROWS: usize = 2 * packed_avx2::ROWS;

    fn panels_at_once(rows: usize) -> usize {
        packed_avx2::panels_at_once(rows)
    }

    unsafe fn multiply(rows: usize, a: &[f32], b: &[f32], sums: Sums<'_>, accumulate: bool) {
        // SAFETY: the caller guarantees this level.
        unsafe { multiply(rows, a, b, sums, accumulate) }
    }

    unsafe fn multiply_packed(
        format: Format,
        rows: usize,
        a: &[f32],
        codes: &[&[u8]],
        sums: &mut Sums<'_>,
        accumulate: bool,
    ) -> bool {
        // SAFETY: the caller guarantees this level.
        unsafe { packed_avx2::multiply(format, rows, a, codes, sums, accumulate) }
    }
}

#[target_feature(enable = "avx2,fma")]
fn multiply(rows: usize, a: &[f32], b: &[f32], sums: Sums<'_>, accumulate: bool) {
    tiles!(rows, tile, (a, b, sums, accumulate), 1 2 3 4 5 6)
}

#[target_feature(enable = "avx2,fma")]
fn tile<const R: usize>(a: &[f32], b: &[f32], sums: Sums<'_>, accumulate: bool) {
    let (b, _) = b.as_chunks::<NARROW_PANEL>();
    let (a, _) = a.as_chunks::<R>();
    assert!(sums.values.len() >= (R - 1) * sums.stride + NARROW_PANEL);
    assert!(a.len() >= b.len());
    let (stride, sums) = (sums.stride, sums.values.as_mut_ptr());
    let mut tile = [[_mm256_setzero_ps(); 2]; R];
    // SAFETY: the rows of `sums` were checked above; a row of `b` is two vectors.
    unsafe {
        if accumulate {
            for (row, tile) in tile.iter_mut().enumerate() {
                tile[0] = _mm256_loadu_ps(sums.add(row * stride));
                tile[1] = _mm256_loadu_ps(sums.add(row * stride + 8));
            }
        }
        for (a, b) in a.iter().zip(b) {
            let b = [
                _mm256_loadu_ps(b.as_ptr()),
                _mm256_loadu_ps(b.as_ptr().add(8)),
            ];
            for (a, tile) in a.iter().zip(&mut tile) {
                let a = _mm256_broadcast_ss(a);
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
