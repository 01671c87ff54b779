//! Packing to f32 against its definition, code by code.

use super::super::engine_f32::{self, F32Engine, Tiles, height};
use super::super::kernel::{Engine, Matrix};
use super::super::layout::{self, DEPTH, ROWS, ROWS_STEP, SLICE};
use super::super::packed_f32::reads;
#[cfg(target_arch = "x86_64")]
use super::super::tile_f32::{Avx2, Avx512};
#[cfg(target_arch = "aarch64")]
use super::super::tile_neon::Neon;
use super::*;
use crate::base::parallel::shared::Shared;

/// Where packing has written nothing.
const UNTOUCHED: f32 = 12345.;

/// NaNs are equal.
fn same(left: f32, right: f32) -> bool {
    left.to_bits() == right.to_bits() || left.is_nan() && right.is_nan()
}

#[test]
fn packing_equals_its_definition() {
    #[cfg(target_arch = "x86_64")]
    {
        check::<Avx2>();
        check::<Avx512>();
    }
    #[cfg(target_arch = "aarch64")]
    check::<Neon>();
}

fn check<T: Tiles>() {
    let Some(engine) = Isa::available().find_map(F32Engine::<T>::of) else {
        println!("skipped: no {}", T::LEVEL.name());
        return;
    };
    let sizes = [
        (1, 1),
        (5, 31),
        (6, 32),
        (7, 33),
        (16, 255),
        (17, 256),
        (12, 200),
        (13, 65),
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
                    elements: &codes,
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

/// Parts of a slice, of every height, whose vectors end within the room that a tile has.
#[cfg(target_arch = "x86_64")]
#[test]
fn tiles_of_all_heights_stay_in_their_room() {
    use super::super::pack_f32::{MOST_ROWS, tile};
    if !Isa::available().any(|isa| isa.level() == fp8_core::IsaLevel::Avx2) {
        println!("skipped: no avx2");
        return;
    }
    let (kept, contracted) = (30, 300);
    let codes: Vec<u8> = (0..kept * contracted)
        .map(|i| (i * 37 + i / 256) as u8)
        .collect();
    let check =
        |format: Format, contraction, [row, height]: [usize; 2], [start, len]: [usize; 2]| {
            let matrix = Matrix {
                elements: &codes,
                kept,
                contracted,
                contraction,
            };
            let room = (len + DEPTH) * height;
            let mut packed = vec![UNTOUCHED; room + 64];
            let (dst, behind) = packed.split_at_mut(room);
            // SAFETY: the processor has AVX2, FMA and F16C.
            unsafe { tile(format, matrix, row..row + height, start..start + len, dst) };
            let what = format!("{format} {contraction:?} {height}x{len}");
            assert!(behind.iter().all(|&x| x == UNTOUCHED), "{what}");
            let padded = len.next_multiple_of(DEPTH);
            for (at, &got) in dst[..padded * height].iter().enumerate() {
                let (k, row) = (at / height, row + at % height);
                let expected = match k < len {
                    true => format.decode(codes[matrix.place(row, start + k)]),
                    false => 0.,
                };
                assert!(
                    same(got, expected),
                    "{what} [{row}, {k}]: {got}, expected {expected}"
                );
            }
        };
    for format in Format::ALL {
        for contraction in [Cols, Rows] {
            for height in 1..=MOST_ROWS {
                for len in [1, 2, 3, 15, 16, 17, 31, 32, 44, 65] {
                    // The last codes of the operand, and others.
                    let end = [kept - height, contracted - len];
                    check(format, contraction, [end[0], height], [end[1], len]);
                    check(format, contraction, [0, height], [7, len]);
                }
            }
        }
    }
}

fn check_a<T: Tiles>(
    engine: F32Engine<T>,
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
        let (mut first, mut height) = (0, height::<T>(0, kept));
        while first + height <= row {
            first += height;
            height = engine_f32::height::<T>(first, kept);
        }
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

fn check_b<T: Tiles>(
    engine: F32Engine<T>,
    format: Format,
    matrix: Matrix<'_>,
    value: &dyn Fn(usize, usize) -> f32,
    what: &str,
) {
    let Matrix {
        elements: codes,
        kept,
        contracted,
        contraction,
    } = matrix;
    let width = T::ORDER.panel();
    let depth = contracted.next_multiple_of(DEPTH);
    for first in (0..kept).step_by(width) {
        let cols = width.min(kept - first);
        // Columns that do not exist are zero where a row of codes ends; elsewhere their values do not count.
        let expected = |k: usize, col: usize| match (k < contracted, col < cols) {
            (true, true) => Some(value(first + col, k)),
            (true, false) if contraction == Cols => None,
            _ => Some(0.),
        };
        let check = |packed: &[f32], expected: &dyn Fn(usize, usize) -> Option<f32>, how: &str| {
            for (at, &got) in packed.iter().enumerate() {
                let (k, col) = (at / width, at % width);
                let right = expected(k, col).is_none_or(|expected| same(got, expected));
                let at = first + col;
                assert!(
                    right,
                    "{what} {how} B[{at}, {k}]: {got}, expected {:?}",
                    expected(k, col)
                );
            }
        };
        // In two parts, as slices come.
        let mut packed = vec![UNTOUCHED; depth * width];
        let middle = depth / 2 / DEPTH * DEPTH;
        let (left, right) = packed.split_at_mut(middle * width);
        engine.pack_b(format, matrix, first, 0..middle, left);
        engine.pack_b(format, matrix, first, middle..depth, right);
        check(&packed, &expected, "from codes");
        if contraction == Cols && reads(format, &[]) {
            // A number takes the place of what is not packed.
            let one = 0x38;
            assert!(reads(format, &[one]));
            let codes = codes.iter().map(|&code| match reads(format, &[code]) {
                true => code,
                false => one,
            });
            let codes: Vec<u8> = codes.collect();
            let expected = |k: usize, col: usize| {
                let value = expected(k, col)?;
                Some(if value.is_finite() {
                    value
                } else {
                    format.decode(one)
                })
            };
            let codes = pack_codes(T::ORDER, &codes, kept, contracted);
            let start = first / width * depth * width;
            packed.fill(UNTOUCHED);
            engine.decode_panel(format, &codes[start..start + depth * width], &mut packed);
            check(&packed, &expected, "from packed codes");
        }
    }
}
