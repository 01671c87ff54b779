//! Packed panels against their definition.

use super::super::layout::{self, PANEL, ROWS};
use super::*;

/// The vector packings equal the scalar ones of `layout.rs`.
#[test]
fn packing_equals_its_definition() {
    use super::super::engine_bf16::Bf16Engine;
    use super::super::kernel::{Engine, Matrix};
    use super::super::layout::Order;
    use crate::base::parallel::shared::Shared;

    let engines: Vec<Bf16Engine> = Isa::available().filter_map(Bf16Engine::of).collect();
    if engines.is_empty() {
        fp8_test_support::skipped("this processor multiplies no bf16");
    }
    for engine in engines {
        for format in Format::ALL {
            let sizes = [
                (1, 1),
                (5, 2),
                (13, 3),
                (16, 31),
                (17, 32),
                (33, 70),
                (70, 600),
                (109, 258),
            ];
            for (kept, contracted) in sizes {
                // Every code, NaN and infinity too.
                let codes: Vec<u8> = (0..kept * contracted).map(|i| (i * 7) as u8).collect();
                for contraction in [Cols, Rows] {
                    let code = |i: usize, l: usize| {
                        codes[match contraction {
                            Cols => i * contracted + l,
                            Rows => l * kept + i,
                        }]
                    };
                    let matrix = Matrix {
                        elements: &codes,
                        kept,
                        contracted,
                        contraction,
                    };
                    let what = format!("{format} {kept}x{contracted} {contraction:?}");

                    let pairs = contraction == Rows && engine.packs_pairs(kept);
                    let expected = match pairs {
                        false => layout::reference::pack_a(format, kept, contracted, code),
                        true => layout::reference::pack_a_pairs(format, kept, contracted, code),
                    };
                    let mut packed = vec![0; expected.len()];
                    let rows = kept.next_multiple_of(ROWS);
                    // SAFETY: no other task runs.
                    unsafe {
                        let dst = Shared::new(&mut packed);
                        engine.pack_a(format, matrix, 0..kept, 0, rows, dst);
                    }
                    if pairs {
                        drop_rests(&mut packed, kept, contracted);
                    }
                    assert_eq!(bits(&packed), bits(&expected), "A, {what}");

                    // The same values in bf16.
                    let of_code = |&code| bf16::from_f32(format.decode(code)).to_bits();
                    let values: Vec<u16> = codes.iter().map(of_code).collect();
                    let in_bf16 = Matrix {
                        elements: &values,
                        kept,
                        contracted,
                        contraction,
                    };
                    let mut packed = vec![0; expected.len()];
                    // SAFETY: no other task runs.
                    unsafe {
                        let dst = Shared::new(&mut packed);
                        engine.pack_a_bf16(in_bf16, 0..kept, 0, rows, dst);
                    }
                    if pairs {
                        drop_rests(&mut packed, kept, contracted);
                    }
                    assert_eq!(bits(&packed), bits(&expected), "A in bf16, {what}");

                    let expected = layout::reference::pack_b(format, kept, contracted, code);
                    let mut packed = vec![0x5555; expected.len()];
                    let len = layout::b_len(PANEL, 1, contracted);
                    for (panel, dst) in packed.chunks_mut(len).enumerate() {
                        let middle = (contracted / 2).next_multiple_of(32);
                        let (left, right) = dst.split_at_mut(middle * PANEL);
                        let (first, end) = (panel * PANEL, layout::padded(contracted));
                        engine.pack_b(format, matrix, first, 0..middle, left);
                        engine.pack_b(format, matrix, first, middle..end, right);
                    }
                    assert_eq!(bits(&packed), bits(&expected), "B, {what}");
                    packed.fill(0x5555);
                    for (panel, dst) in packed.chunks_mut(len).enumerate() {
                        let middle = (contracted / 2).next_multiple_of(32);
                        let (left, right) = dst.split_at_mut(middle * PANEL);
                        let (first, end) = (panel * PANEL, layout::padded(contracted));
                        engine.pack_b_bf16(in_bf16, first, 0..middle, left);
                        engine.pack_b_bf16(in_bf16, first, middle..end, right);
                    }
                    assert_eq!(bits(&packed), bits(&expected), "B in bf16, {what}");
                    if contraction == Cols {
                        let codes = pack_codes(Order::Pairs, &codes, kept, contracted);
                        packed.fill(0x5555);
                        for (codes, dst) in codes.chunks(len).zip(packed.chunks_mut(len)) {
                            engine.decode_panel(format, codes, dst);
                        }
                        assert_eq!(bits(&packed), bits(&expected), "packed codes, {what}");
                    }
                }
            }
        }
    }
}

/// Zeros for what the packing leaves behind each tile of pairs.
fn drop_rests(packed: &mut [u16], rows: usize, k: usize) {
    use super::super::tile_bf16::height;
    let (padded_rows, sum) = (rows.next_multiple_of(ROWS), layout::padded(k));
    for start in (0..sum).step_by(SLICE) {
        let mut first = 0;
        while first < rows {
            let height = height(first, rows);
            let tile = (start / SLICE * padded_rows + first) * layout::SLICE_STRIDE;
            let len = (sum - start).min(SLICE) * height;
            packed[tile + len..tile + height * layout::SLICE_STRIDE].fill(0);
            first += height;
        }
    }
}

/// Every NaN as one, since its bits mean nothing.
fn bits(values: &[u16]) -> Vec<u16> {
    let of = |&bits: &u16| {
        if bf16::from_bits(bits).is_nan() {
            0x7FC0
        } else {
            bits
        }
    };
    values.iter().map(of).collect()
}
