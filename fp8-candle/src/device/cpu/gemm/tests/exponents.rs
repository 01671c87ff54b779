//! Scales that are applied while packing.

use super::super::exponents::with_added;
use super::*;

#[test]
fn adding_to_exponents_multiplies() {
    for format in Format::ALL {
        for code in 0..=255 {
            let value = format.decode(code);
            for below in 0..=46 {
                let added = (-below << 7) as u16;
                let expected = value * 2f32.powi(-below);
                let bits = with_added(bf16::from_f32(value).to_bits(), added);
                let got = bf16::from_bits(bits).to_f32();
                let same = got.to_bits() == expected.to_bits();
                let nan = got.is_nan() && expected.is_nan();
                assert!(same || nan, "{format} {code:#x}, 2^-{below}: {got:e}");
            }
        }
    }
}

/// An operand in MX groups, the scales of some of whose kept indices cannot be folded.
fn with_odd_scales(seed: u64, sizes: (usize, usize), contraction: Contraction) -> Operand {
    let (kept, contracted) = sizes;
    let mut operand = Operand::new(seed, sizes, (Format::E4M3, Granularity::Mx, contraction));
    let grid = operand.grid();
    let at = |kept: usize, index: usize| match contraction {
        Cols => (kept * contracted + index, grid.index(kept, index)),
        Rows => (index * sizes.0 + kept, grid.index(index, kept)),
    };
    for (index, kept) in (0..kept).enumerate() {
        let group = (index * 5 % contracted.div_ceil(32)) * 32;
        let scale = &mut operand.scales[at(kept, group).1];
        match index % 12 {
            // Too far below the others, and above them.
            1 => *scale = 2f32.powi(-60),
            2 => *scale = 2f32.powi(45),
            // Not a power of two.
            3 => *scale = 0.3,
            // Zeros, whose scale is the least.
            5 | 6 => {
                *scale = 2f32.powi(-127);
                for index in group..contracted.min(group + 32) {
                    operand.codes[at(kept, index).0] = (index as u8 & 1) << 7;
                }
            }
            // Nothing but zeros.
            8 => {
                for index in 0..contracted {
                    let (code, scale) = at(kept, index);
                    operand.codes[code] = 0;
                    operand.scales[scale] = 2f32.powi(-127);
                }
            }
            // As small as scales become.
            9 => {
                for index in 0..contracted {
                    operand.scales[at(kept, index).1] = 2f32.powi(-127);
                }
            }
            _ => {}
        }
    }
    operand
}

#[test]
#[cfg_attr(miri, ignore = "takes hours")]
fn scales_of_any_size_scale_their_groups() {
    for (m, n, k) in [(1, 70, 96), (13, 50, 300), (210, 40, 600)] {
        for contractions in [(Cols, Cols), (Cols, Rows), (Rows, Rows), (Rows, Cols)] {
            let a = with_odd_scales(1, (m, k), contractions.0);
            let b = with_odd_scales(2, (n, k), contractions.1);
            let expected = products(&a, &b);
            for isa in Isa::available() {
                let y = multiply::<f32>(isa, &a.row_major(), &b.row_major(), None);
                assert_eq!(y.len(), expected.len());
                for (at, (&y, sum)) in y.iter().zip(&expected).enumerate() {
                    let error = (f64::from(y) - sum.value).abs();
                    // A result may be subnormal.
                    let bound = rounding::bound(k, sum.magnitude, sum.square) + 1e-44;
                    let (row, col) = (at / n, at % n);
                    assert!(
                        error <= bound,
                        "{isa:?} {m}x{n}x{k} {contractions:?} {row}, {col}: {y:e}, expected {:e}",
                        sum.value
                    );
                }
            }
        }
    }
}

/// A row has the same bits alone, among others, and by packed codes, which are decoded by other kernels for 1, 2, and more rows: what
/// cannot be folded in one row does not change another.
#[test]
#[cfg_attr(miri, ignore = "takes hours")]
fn a_row_does_not_depend_on_the_scales_of_others() {
    let (m, n, k) = (26, 70, 300);
    let (a, b) = (
        with_odd_scales(3, (m, k), Cols),
        with_odd_scales(4, (n, k), Cols),
    );
    let groups = k.div_ceil(32);
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for isa in Isa::available() {
        let all = multiply::<f32>(isa, &a.row_major(), &b.row_major(), None);
        let alone = (0..m).map(|row| (row, 1));
        for (row, count) in alone.chain([(2, 2), (8, 3), (7, 14), (1, 18), (0, m)]) {
            let some = Operand {
                codes: a.codes[row * k..][..count * k].to_vec(),
                scales: a.scales[row * groups..][..count * groups].to_vec(),
                sizes: (count, k),
                ..a
            };
            let expected = bits(&all[row * n..][..count * n]);
            let y = multiply::<f32>(isa, &some.row_major(), &b.row_major(), None);
            assert_eq!(bits(&y), expected, "{isa:?}, row {row}, {count} rows");
            if let Some(packed) = pack(isa, b.format, &b.codes, n, k) {
                let order = packed_order(isa).unwrap();
                let b = b.side(Elements::Panels(order, &packed));
                let y = multiply::<f32>(isa, &some.row_major(), &b, None);
                let rows = format!("row {row}, {count} rows");
                assert_eq!(bits(&y), expected, "{isa:?}, {rows}, packed codes");
            }
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "takes hours")]
fn a_scale_that_is_nan_makes_its_row_nan() {
    let mut a = with_odd_scales(5, (6, 100), Cols);
    let b = with_odd_scales(6, (40, 100), Cols);
    let row = 4;
    a.scales[row * 4 + 1] = f32::NAN;
    for isa in Isa::available() {
        let y = multiply::<f32>(isa, &a.row_major(), &b.row_major(), None);
        let nan: Vec<bool> = y.iter().map(|y| y.is_nan()).collect();
        let expected: Vec<bool> = (0..y.len()).map(|at| at / 40 == row).collect();
        assert_eq!(nan, expected, "{isa:?}");
    }
}
