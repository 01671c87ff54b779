//! Packing for AVX2 against its definition, code by code.

use super::super::engine_avx2::Avx2Engine;
use super::super::kernel::{Engine, Matrix};
use super::super::layout::{self, DEPTH, NARROW_PANEL, Order, ROWS, ROWS_STEP, SLICE};
use super::super::tile_avx2;
use super::*;
use crate::device::cpu::shared::Shared;

/// Where packing has written nothing.
const UNTOUCHED: f32 = 12345.;

/// NaNs are equal.
fn same(left: f32, right: f32) -> bool {
    left.to_bits() == right.to_bits() || left.is_nan() && right.is_nan()
}

#[test]
fn packing_equals_its_definition() {
    let Some(engine) = Isa::available().find_map(Avx2Engine::of) else {
        println!("skipped: no AVX2");
        return;
    };
    let sizes = [
        (1, 1),
        (5, 31),
        (6, 32),
        (7, 33),
        (16, 255),
        (17, 256),
        (33, 300),
        (96, 40),
        (97, 520),
        (103, 17),
    ];
    for format in Format::ALL {
        for (kept, contracted) in sizes {
            for contraction in [Cols, Rows] {
                // All codes, NaN and infinities among them.
                let codes: Vec<u8> = (0..kept * contracted)
                    .map(|i| (i * 37 + i / 256) as u8)
                    .collect();
                let matrix = Matrix {
                    codes: &codes,
                    kept,
                    contracted,
                    contraction,
                };
                let value = |kept: usize, k: usize| format.decode(codes[matrix.place(kept, k)]);
                let what = format!("{format} [{kept}, {contracted}] {contraction:?}");
                check_a(engine, format, matrix, &value, &what);
                check_b(engine, format, matrix, &value, &what);
            }
        }
    }
}

fn check_a(
    engine: Avx2Engine,
    format: Format,
    matrix: Matrix<'_>,
    value: &dyn Fn(usize, usize) -> f32,
    what: &str,
) {
    let Matrix {
        kept, contracted, ..
    } = matrix;
    let padded_rows = kept.next_multiple_of(ROWS);
    let mut packed = vec![UNTOUCHED; layout::a_len(kept, contracted)];
    let shared = Shared::new(&mut packed);
    for start in (0..kept).step_by(ROWS_STEP) {
        let rows = start..kept.min(start + ROWS_STEP);
        // SAFETY: one call after the other.
        unsafe { engine.pack_a(format, matrix, rows, 0, padded_rows, shared) };
    }
    for row in 0..kept {
        let first = row / tile_avx2::ROWS * tile_avx2::ROWS;
        let height = tile_avx2::ROWS.min(kept - first);
        for k in 0..contracted.next_multiple_of(DEPTH) {
            let tile = (k / SLICE * padded_rows + first) * layout::SLICE_STRIDE;
            let got = packed[tile + k % SLICE * height + row - first];
            let expected = if k < contracted { value(row, k) } else { 0. };
            assert!(
                same(got, expected),
                "{what} A[{row}, {k}]: {got}, expected {expected}"
            );
        }
    }
}

fn check_b(
    engine: Avx2Engine,
    format: Format,
    matrix: Matrix<'_>,
    value: &dyn Fn(usize, usize) -> f32,
    what: &str,
) {
    let Matrix {
        codes,
        kept,
        contracted,
        contraction,
    } = matrix;
    let depth = contracted.next_multiple_of(DEPTH);
    let decoded = pack_codes(Order::NarrowRows, codes, kept, contracted);
    for first in (0..kept).step_by(NARROW_PANEL) {
        let cols = NARROW_PANEL.min(kept - first);
        // In two parts, as slices come.
        let mut packed = vec![UNTOUCHED; depth * NARROW_PANEL];
        let middle = depth / 2 / DEPTH * DEPTH;
        let (left, right) = packed.split_at_mut(middle * NARROW_PANEL);
        engine.pack_b(format, matrix, first, 0..middle, left);
        engine.pack_b(format, matrix, first, middle..depth, right);
        for k in 0..depth {
            for col in 0..cols {
                let got = packed[k * NARROW_PANEL + col];
                let expected = match k < contracted {
                    true => value(first + col, k),
                    false => 0.,
                };
                let at = first + col;
                assert!(
                    same(got, expected),
                    "{what} B[{at}, {k}]: {got}, expected {expected}"
                );
            }
        }
        if contraction == Cols {
            let start = first / NARROW_PANEL * depth * NARROW_PANEL;
            let codes = &decoded[start..start + depth * NARROW_PANEL];
            let mut panel = vec![UNTOUCHED; codes.len()];
            engine.decode_panel(format, codes, &mut panel);
            for k in 0..contracted {
                for col in 0..cols {
                    let (got, expected) = (panel[k * NARROW_PANEL + col], value(first + col, k));
                    assert!(
                        same(got, expected),
                        "{what} panel {first} [{col}, {k}]: {got}"
                    );
                }
            }
        }
    }
}
