//! Tiles of sums with f32 multiply-adds of AVX-512: twelve rows by one panel of 32 columns.

use super::engine_f32::{Tiles, tiles};
use super::kernel::Sums;
use super::layout::{Order, PANEL};
use fp8_core::IsaLevel;
use std::arch::x86_64::*;

/// AVX-512 without bf16 units.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Avx512;

// SAFETY: a level includes those before it, AVX2 among them.
unsafe impl Tiles for Avx512 {
    const LEVEL: IsaLevel = IsaLevel::Avx512;
    const ORDER: Order = Order::Columns;
    const ROWS: usize = 12;
    const TASK_SIZE: (usize, usize) = (192, 8);

    unsafe fn multiply(rows: usize, a: &[f32], b: &[f32], sums: Sums<'_>, accumulate: bool) {
        // SAFETY: the caller guarantees this level.
        unsafe { multiply(rows, a, b, sums, accumulate) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn multiply(rows: usize, a: &[f32], b: &[f32], sums: Sums<'_>, accumulate: bool) {
    tiles!(rows, tile, (a, b, sums, accumulate), 1 2 3 4 5 6 7 8 9 10 11 12)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn tile<const R: usize>(a: &[f32], b: &[f32], sums: Sums<'_>, accumulate: bool) {
    let (b, _) = b.as_chunks::<PANEL>();
    let (a, _) = a.as_chunks::<R>();
    assert!(sums.values.len() >= (R - 1) * sums.stride + PANEL);
    assert!(a.len() >= b.len());
    let (stride, sums) = (sums.stride, sums.values.as_mut_ptr());
    let mut tile = [[_mm512_setzero_ps(); 2]; R];
    // SAFETY: the rows of `sums` were checked above; a row of `b` is two vectors.
    unsafe {
        if accumulate {
            for (row, tile) in tile.iter_mut().enumerate() {
                tile[0] = _mm512_loadu_ps(sums.add(row * stride));
                tile[1] = _mm512_loadu_ps(sums.add(row * stride + 16));
            }
        }
        for (a, b) in a.iter().zip(b) {
            let b = [
                _mm512_loadu_ps(b.as_ptr()),
                _mm512_loadu_ps(b.as_ptr().add(16)),
            ];
            for (a, tile) in a.iter().zip(&mut tile) {
                let a = _mm512_set1_ps(*a);
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
