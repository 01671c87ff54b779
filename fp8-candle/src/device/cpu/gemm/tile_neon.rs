//! Tiles of sums with f32 multiply-adds of NEON: six rows by one panel of 16 columns, which is four vectors.
//!
//! They have been run under an emulator only, and their speed is unmeasured.

use super::engine_f32::{STEPS, Tiles, To, tiles};
use super::kernel::Sums;
use super::layout::{NARROW_PANEL, Order};
use super::packed_f32::TileRows;
use super::packed_neon;
use super::row_neon;
use fp8_core::{Format, IsaLevel};

/// NEON.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Neon;

// SAFETY: the level is NEON, which packing uses and the tiles do.
unsafe impl Tiles for Neon {
    const LEVEL: IsaLevel = IsaLevel::Neon;
    const ORDER: Order = Order::NarrowColumns;
    const ROWS: usize = packed_neon::ROWS;
    const TASK_SIZE: (usize, usize) = (192, 16);

    unsafe fn multiply(rows: usize, a: &[f32], b: &[f32], to: To<'_>) {
        // SAFETY: the caller guarantees this level.
        unsafe { multiply(rows, a, b, to) }
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
        unsafe { packed_neon::multiply(format, rows, a, codes, sums, accumulate) }
    }
}

#[target_feature(enable = "neon")]
fn multiply(rows: usize, a: &[f32], b: &[f32], to: To<'_>) {
    tiles!(rows, tile, (a, b, to), 1 2 3 4 5 6)
}

/// A tile of `R` rows.
#[target_feature(enable = "neon")]
fn tile<const R: usize>(a: &[f32], b: &[f32], to: To<'_>) {
    let (b, _) = b.as_chunks::<NARROW_PANEL>();
    let (a, _) = a.as_chunks::<R>();
    // The length of a sum is a multiple of more steps than that.
    let ((b, rest), (a, _)) = (b.as_chunks::<STEPS>(), a.as_chunks::<STEPS>());
    assert!(rest.is_empty());
    let To {
        sums,
        accumulate,
        ahead,
    } = to;
    assert!(sums.values.len() >= (R - 1) * sums.stride + NARROW_PANEL);
    assert!(a.len() >= b.len());
    let (stride, sums) = (sums.stride, sums.values.as_mut_ptr());
    // SAFETY: this function has NEON, the rows of `sums` were checked above, and a row of `b` has sixteen numbers.
    unsafe {
        let mut tile = [row_neon::zeros(); R];
        if accumulate {
            for (row, tile) in tile.iter_mut().enumerate() {
                *tile = row_neon::load(sums.add(row * stride));
            }
        }
        // By index, as in `tile_f32.rs`.
        for (part, b) in b.iter().enumerate() {
            ahead.fetch(part);
            let a = &a[part];
            for (step, b) in b.iter().enumerate() {
                let values = row_neon::load(b.as_ptr());
                for (row, tile) in tile.iter_mut().enumerate() {
                    *tile = row_neon::multiply_add(*tile, values, a[step][row]);
                }
            }
        }
        for (row, &tile) in tile.iter().enumerate() {
            row_neon::store(tile, sums.add(row * stride));
        }
    }
}
