//! Tiles of sums with f32 multiply-adds: twelve rows by one panel of 32 columns with AVX-512, six by 16 with AVX2.

use super::engine_f32::{STEPS, Tiles, To, tiles};
use super::kernel::Sums;
use super::layout::{NARROW_PANEL, Order, PANEL};
use super::packed_f32::TileRows;
use super::{packed_avx2, packed_avx512};
use fp8_core::{Format, IsaLevel};
use std::arch::x86_64::*;

/// AVX-512 without bf16 units.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Avx512;

/// AVX2 with FMA and F16C.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Avx2;

// SAFETY: a level includes those before it, AVX2 among them.
unsafe impl Tiles for Avx512 {
    const LEVEL: IsaLevel = IsaLevel::Avx512;
    const ORDER: Order = Order::Columns;
    const ROWS: usize = packed_avx512::ROWS;
    const TASK_SIZE: (usize, usize) = (192, 8);

    unsafe fn multiply(rows: usize, a: &[f32], b: &[f32], to: To<'_>) {
        // SAFETY: the caller guarantees this level.
        unsafe { multiply_avx512(rows, a, b, to) }
    }

    unsafe fn multiply_packed(
        format: Format,
        rows: usize,
        a: TileRows<'_>,
        codes: &[&[u8]],
        sums: &mut Sums<'_>,
        accumulate: bool,
    ) {
        // SAFETY: the caller guarantees this level.
        unsafe { packed_avx512::multiply(format, rows, a, codes, sums, accumulate) }
    }
}

// SAFETY: the level is AVX2 with FMA and F16C.
unsafe impl Tiles for Avx2 {
    const LEVEL: IsaLevel = IsaLevel::Avx2;
    const ORDER: Order = Order::NarrowColumns;
    const ROWS: usize = packed_avx2::ROWS;
    const TASK_SIZE: (usize, usize) = (192, 16);

    unsafe fn multiply(rows: usize, a: &[f32], b: &[f32], to: To<'_>) {
        // SAFETY: the caller guarantees this level.
        unsafe { multiply_avx2(rows, a, b, to) }
    }

    unsafe fn multiply_packed(
        format: Format,
        rows: usize,
        a: TileRows<'_>,
        codes: &[&[u8]],
        sums: &mut Sums<'_>,
        accumulate: bool,
    ) {
        let how = (format, packed_avx2::route());
        // SAFETY: the caller guarantees this level.
        unsafe { packed_avx2::multiply(how, rows, a, codes, sums, accumulate) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn multiply_avx512(rows: usize, a: &[f32], b: &[f32], to: To<'_>) {
    tiles!(rows, tile_avx512, (a, b, to), 1 2 3 4 5 6 7 8 9 10 11 12)
}

#[target_feature(enable = "avx2,fma")]
fn multiply_avx2(rows: usize, a: &[f32], b: &[f32], to: To<'_>) {
    tiles!(rows, tile_avx2, (a, b, to), 1 2 3 4 5 6)
}

/// A tile of `R` rows by a panel of two vectors.
macro_rules! tile {
    (
        $name:ident, $features:literal, $panel:expr;
        $zero:ident, $load:ident, $store:ident, $multiply_add:ident, |$a:ident| $splat:expr
    ) => {
        #[target_feature(enable = $features)]
        fn $name<const R: usize>(a: &[f32], b: &[f32], to: To<'_>) {
            const LANES: usize = $panel / 2;
            let (b, _) = b.as_chunks::<{ $panel }>();
            let (a, _) = a.as_chunks::<R>();
            // The length of a sum is a multiple of more steps than that.
            let ((b, rest), (a, _)) = (b.as_chunks::<STEPS>(), a.as_chunks::<STEPS>());
            assert!(rest.is_empty());
            let To {
                sums,
                accumulate,
                ahead,
            } = to;
            assert!(sums.values.len() >= (R - 1) * sums.stride + $panel);
            assert!(a.len() >= b.len());
            let (stride, sums) = (sums.stride, sums.values.as_mut_ptr());
            let mut tile = [[$zero(); 2]; R];
            // SAFETY: the rows of `sums` were checked above; a row of `b` is two vectors.
            unsafe {
                if accumulate {
                    for (row, tile) in tile.iter_mut().enumerate() {
                        tile[0] = $load(sums.add(row * stride));
                        tile[1] = $load(sums.add(row * stride + LANES));
                    }
                }
                // By index: `zip` is a call unless the compiler sees the whole crate at once, and the tile would not stay in registers.
                for (part, b) in b.iter().enumerate() {
                    ahead.fetch(part);
                    let a = &a[part];
                    for (step, b) in b.iter().enumerate() {
                        let b = [$load(b.as_ptr()), $load(b.as_ptr().add(LANES))];
                        for (row, tile) in tile.iter_mut().enumerate() {
                            let $a = &a[step][row];
                            let a = $splat;
                            tile[0] = $multiply_add(a, b[0], tile[0]);
                            tile[1] = $multiply_add(a, b[1], tile[1]);
                        }
                    }
                }
                for (row, tile) in tile.iter().enumerate() {
                    $store(sums.add(row * stride), tile[0]);
                    $store(sums.add(row * stride + LANES), tile[1]);
                }
            }
        }
    };
}
tile! {
    tile_avx512, "avx512f,avx512bw,avx512vl,avx512dq", PANEL;
    _mm512_setzero_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps, |a| _mm512_set1_ps(*a)
}
tile! {
    tile_avx2, "avx2,fma", NARROW_PANEL;
    _mm256_setzero_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps, |a| _mm256_broadcast_ss(a)
}
