//! Every GEMM, on every instruction set of the machine, against f64 sums of the values of the codes.

mod bf16_operands;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod exponents;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod finishing;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod packed;
#[cfg(target_arch = "x86_64")]
mod packing;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod packing_f32;

use super::layout::{SLICE, pack_codes};
use super::side::{Elements, Side};
use super::{multiply, pack, packed_order};
use fp8_core::Contraction::{self, Cols, Rows};
use fp8_core::{Format, Granularity, Isa};
use fp8_test_support::rounding;
use half::{bf16, f16};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// One operand with its scales, and its values as `[kept, contracted]`.
struct Operand {
    codes: Vec<u8>,
    scales: Vec<f32>,
    format: Format,
    granularity: Granularity,
    contraction: Contraction,
    sizes: (usize, usize),
}

impl Operand {
    fn new(
        seed: u64,
        (kept, contracted): (usize, usize),
        (format, granularity, contraction): (Format, Granularity, Contraction),
    ) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        // All finite codes of E4M3 with its subnormals; E5M2 below 2^6, or its largest values would dominate the sums.
        let top = if format == Format::E4M3 { 0x7F } else { 0x55 };
        let mut code = || match rng.random_range(0..top) | rng.random::<u8>() & 0x80 {
            // The NaN of the fnuz formats.
            0x80 => 0x81,
            code => code,
        };
        let codes = (0..kept * contracted).map(|_| code()).collect();
        let mut operand = Self {
            codes,
            scales: vec![],
            format,
            granularity,
            contraction,
            sizes: (kept, contracted),
        };
        let scales = operand.grid().len();
        let scale = |_| match granularity {
            Granularity::Mx => 2f32.powi(rng.random_range(-9..=3)),
            _ => rng.random_range(0.25..4.),
        };
        operand.scales = (0..scales).map(scale).collect();
        operand
    }

    fn grid(&self) -> fp8_core::ScaleGrid {
        let (kept, contracted) = self.sizes;
        let (rows, cols) = match self.contraction {
            Cols => (kept, contracted),
            Rows => (contracted, kept),
        };
        self.granularity.grid(rows, cols, self.contraction)
    }

    fn side<'a>(&'a self, elements: Elements<'a>) -> Side<'a> {
        Side {
            elements,
            format: self.format,
            grid: self.grid(),
            dequant_scales: &self.scales,
            powers_of_two: self.granularity == Granularity::Mx,
            contraction: self.contraction,
        }
    }

    fn row_major(&self) -> Side<'_> {
        self.side(Elements::Codes(&self.codes))
    }

    fn values(&self) -> Vec<f64> {
        let (kept, contracted) = self.sizes;
        let side = self.row_major();
        let mut values = Vec::with_capacity(kept * contracted);
        for i in 0..kept {
            for l in 0..contracted {
                let at = match self.contraction {
                    Cols => i * contracted + l,
                    Rows => l * kept + i,
                };
                let value = f64::from(self.format.decode(self.codes[at]));
                values.push(value * f64::from(side.scale(i, l)));
            }
        }
        values
    }
}

/// A sum of products, and what its error depends on.
#[derive(Clone, Copy, Default)]
struct Sum {
    value: f64,
    /// The sum of |a||b|.
    magnitude: f64,
    /// The sum of (a b)^2.
    square: f64,
}

impl Sum {
    fn of(a: &[f64], b: &[f64]) -> Self {
        let mut sum = Self::default();
        for (a, b) in a.iter().zip(b) {
            let product = a * b;
            sum.value += product;
            sum.magnitude += product.abs();
            sum.square += product * product;
        }
        sum
    }
}

fn products(a: &Operand, b: &Operand) -> Vec<Sum> {
    let ((m, k), (n, _)) = (a.sizes, b.sizes);
    let (a, b) = (a.values(), b.values());
    let mut out = Vec::with_capacity(m * n);
    for i in 0..m {
        for j in 0..n {
            out.push(Sum::of(&a[i * k..(i + 1) * k], &b[j * k..(j + 1) * k]));
        }
    }
    out
}

/// How many sums it takes for their norm to be meaningful.
const MANY: usize = 200;

/// Fails where one of these sums of `k` terms is farther off than its roundings explain ([`rounding`]), or all together.
#[track_caller]
fn assert_close(got: &[f32], expected: &[Sum], k: usize, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let (mut errors, mut norm) = (0., 0.);
    for (at, (&got, sum)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(got) - sum.value).abs();
        let bound = rounding::bound(k, sum.magnitude, sum.square);
        assert!(
            error <= bound,
            "{what} at {at}: {got:e}, expected {:e}, bound {bound:e}",
            sum.value
        );
        errors += error * error;
        norm += sum.value * sum.value;
    }
    let share = (errors / norm).sqrt();
    assert!(
        expected.len() < MANY || errors == 0. || share <= rounding::norm_share(k),
        "{what}: all together {share:e}, bound {:e}",
        rounding::norm_share(k)
    );
}

fn check(isa: Isa, a: &Operand, b: &Operand, expected: &[Sum], what: &str) {
    let what = format!("{isa:?}, {what}, {:?} x {:?}", a.sizes, b.sizes);
    let y = multiply::<f32>(isa, &a.row_major(), &b.row_major(), None);
    assert_close(&y, expected, a.sizes.1, &what);
    let (n, k) = b.sizes;
    if let (Cols, Some(packed)) = (b.contraction, pack(isa, b.format, &b.codes, n, k)) {
        let order = packed_order(isa).unwrap();
        let b = b.side(Elements::Panels(order, &packed));
        let of_packed = multiply::<f32>(isa, &a.row_major(), &b, None);
        assert_eq!(of_packed, y, "{what}: packed codes");
    }
}

const FORMATS: [(Format, Format); 4] = [
    (Format::E4M3, Format::E4M3),
    (Format::E4M3, Format::E5M2),
    (Format::E5M2, Format::E4M3),
    (Format::E4M3Fnuz, Format::E5M2Fnuz),
];

#[test]
#[cfg_attr(miri, ignore = "takes hours")]
fn all_remainders_of_all_sizes() {
    let rows = [
        1, 2, 3, 6, 7, 11, 12, 13, 16, 17, 31, 32, 33, 48, 49, 193, 200,
    ];
    let cols = [1, 15, 16, 17, 31, 32, 33, 64, 65, 97];
    let depths = [
        1,
        2,
        31,
        32,
        33,
        63,
        64,
        65,
        127,
        SLICE - 1,
        SLICE,
        SLICE + 1,
        SLICE + 33,
    ];
    let contractions = [(Cols, Cols), (Cols, Rows), (Rows, Rows), (Rows, Cols)];
    let mut seed = 0;
    let mut run = |m, n, k| {
        seed += 1;
        let (a_contraction, b_contraction) = contractions[seed as usize % 4];
        let (a_format, b_format) = FORMATS[seed as usize / 4 % 4];
        let granularity = [Granularity::Tensorwise, Granularity::Rowwise][seed as usize / 16 % 2];
        let a = Operand::new(seed, (m, k), (a_format, granularity, a_contraction));
        let b = Operand::new(seed + 1000, (n, k), (b_format, granularity, b_contraction));
        let expected = products(&a, &b);
        for isa in Isa::available() {
            let what = format!("{a_format} {a_contraction:?}, {b_format} {b_contraction:?}");
            check(isa, &a, &b, &expected, &what);
        }
    };
    for m in rows {
        for n in cols {
            run(m, n, depths[(m * 7 + n) % depths.len()]);
        }
        for k in depths {
            run(m, cols[(m + k) % cols.len()], k);
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "takes hours")]
fn every_format_contraction_and_granularity() {
    let block = |rows, cols| Granularity::Blockwise { rows, cols };
    let granularities = [
        (Granularity::Tensorwise, Granularity::Tensorwise),
        (Granularity::Rowwise, Granularity::Rowwise),
        (Granularity::Tensorwise, Granularity::Rowwise),
        (block(1, 128), block(128, 128)),
        (Granularity::Rowwise, block(128, 128)),
        (block(1, 64), block(1, 96)),
        (Granularity::Mx, Granularity::Mx),
        // Their scales change within the shortest run that the bf16 units sum.
        (block(1, 20), Granularity::Tensorwise),
    ];
    for (m, n, k) in [(5, 40, 300), (210, 33, 600)] {
        for formats in FORMATS {
            for granularity in granularities {
                for contractions in [(Cols, Cols), (Cols, Rows), (Rows, Rows), (Rows, Cols)] {
                    let a = Operand::new(1, (m, k), (formats.0, granularity.0, contractions.0));
                    let b = Operand::new(2, (n, k), (formats.1, granularity.1, contractions.1));
                    let expected = products(&a, &b);
                    for isa in Isa::available() {
                        let what = format!("{formats:?} {granularity:?} {contractions:?}");
                        check(isa, &a, &b, &expected, &what);
                    }
                }
            }
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "takes hours")]
fn operands_larger_than_what_is_packed_at_once() {
    // 32 MiB of bf16 hold 16 Mi codes, of f32 half as many. With more rows of A, all kernels are those of many rows.
    let (k, m, n) = (1 << 17, 200, 140);
    let a = Operand::new(1, (m, k), (Format::E4M3, Granularity::Rowwise, Cols));
    let b = Operand::new(2, (n, k), (Format::E5M2, Granularity::Rowwise, Cols));
    let (a_values, b_values) = (a.values(), b.values());
    let places: Vec<_> = (0..m).map(|i| (i, (i * 37 + 5) % n)).collect();
    let sum = |&(i, j): &(usize, usize)| {
        Sum::of(&a_values[i * k..(i + 1) * k], &b_values[j * k..(j + 1) * k])
    };
    let expected: Vec<Sum> = places.iter().map(sum).collect();
    for isa in Isa::available() {
        let y = multiply::<f32>(isa, &a.row_major(), &b.row_major(), None);
        let got: Vec<f32> = places.iter().map(|&(i, j)| y[i * n + j]).collect();
        assert_close(&got, &expected, k, &format!("{isa:?}"));
    }
}

#[test]
#[cfg_attr(miri, ignore = "takes hours")]
fn nan_and_infinity_come_out() {
    for (m, n, k) in [(1, 33, 70), (13, 40, 600), (200, 40, 600)] {
        for contraction in [Cols, Rows] {
            let of = |seed, format, kept| {
                let shape = (format, Granularity::Tensorwise, contraction);
                Operand::new(seed, (kept, k), shape)
            };
            let mut a = of(1, Format::E5M2, m);
            let b = of(2, Format::E4M3, n);
            let last = match contraction {
                Cols => (m - 1) * k + k - 1,
                Rows => (k - 1) * m + m - 1,
            };
            for (code, special) in [(0x7Eu8, f64::NAN), (0x7C, f64::INFINITY)] {
                a.codes[last] = code;
                let expected = products(&a, &b);
                for isa in Isa::available() {
                    let y = multiply::<f32>(isa, &a.row_major(), &b.row_major(), None);
                    assert_eq!(y.len(), expected.len());
                    for (at, (&y, expected)) in y.iter().zip(&expected).enumerate() {
                        let (y, expected) = (f64::from(y), expected.value);
                        let same = y == expected || y.is_nan() && expected.is_nan();
                        assert!(
                            expected.is_finite() && y.is_finite() || same,
                            "{isa:?} {special} at {at}: {y}, expected {expected}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn empty_sizes() {
    for (m, n, k) in [(0, 5, 7), (5, 0, 7), (5, 7, 0), (300, 7, 0), (0, 0, 0)] {
        let a = Operand::new(1, (m, k), (Format::E4M3, Granularity::Tensorwise, Cols));
        let b = Operand::new(2, (n, k), (Format::E4M3, Granularity::Tensorwise, Cols));
        let bias: Vec<f32> = (0..n).map(|i| i as f32).collect();
        for isa in Isa::available() {
            let y = multiply::<f32>(isa, &a.row_major(), &b.row_major(), Some(&bias));
            let expected: Vec<f32> = (0..m).flat_map(|_| bias.clone()).collect();
            assert_eq!(y, expected, "{isa:?} {m} {n} {k}");
        }
    }
}

#[test]
fn results_are_rounded_before_the_bias_is_added() {
    let a = Operand::new(1, (20, 100), (Format::E4M3, Granularity::Rowwise, Cols));
    let b = Operand::new(2, (37, 100), (Format::E4M3, Granularity::Rowwise, Cols));
    let bias: Vec<f32> = (0..37).map(|i| i as f32 * 0.25 - 3.).collect();
    for isa in Isa::available() {
        let sums = multiply::<f32>(isa, &a.row_major(), &b.row_major(), None);
        let y = multiply::<f32>(isa, &a.row_major(), &b.row_major(), Some(&bias));
        assert_eq!((sums.len(), y.len()), (20 * 37, 20 * 37));
        assert!((0..y.len()).all(|i| y[i] == sums[i] + bias[i % 37]));
        let y = multiply::<bf16>(isa, &a.row_major(), &b.row_major(), Some(&bias));
        let rounded = |i: usize| bf16::from_f32(bf16::from_f32(sums[i]).to_f32() + bias[i % 37]);
        assert!(y.len() == sums.len() && y.iter().enumerate().all(|(i, &y)| y == rounded(i)));
        let y = multiply::<f16>(isa, &a.row_major(), &b.row_major(), Some(&bias));
        let rounded = |i: usize| f16::from_f32(f16::from_f32(sums[i]).to_f32() + bias[i % 37]);
        assert!(y.len() == sums.len() && y.iter().enumerate().all(|(i, &y)| y == rounded(i)));
        let y = multiply::<f64>(isa, &a.row_major(), &b.row_major(), None);
        assert_eq!(y.len(), sums.len());
        assert!(y.iter().zip(&sums).all(|(&y, &sum)| y == f64::from(sum)));
    }
}

#[test]
#[cfg_attr(miri, ignore = "takes hours")]
fn the_number_of_threads_changes_nothing() {
    let rowwise = (Granularity::Rowwise, Granularity::Rowwise);
    // Segments of 32.
    let block = |cols| Granularity::Blockwise { rows: 1, cols };
    let blocks = (block(64), block(96));
    // With f32 units and more than 192 rows, tasks pack their own rows (`in_slices.rs`), unless there are many threads (250 rows with 8) or
    // columns (1100).
    for ((m, n, k), of_a, of_b, granularity) in [
        ((2, 500, 900), Cols, Rows, rowwise),
        ((100, 500, 900), Cols, Rows, rowwise),
        ((400, 300, 1100), Cols, Rows, rowwise),
        ((250, 200, 700), Rows, Cols, rowwise),
        ((250, 200, 700), Rows, Cols, blocks),
        ((250, 300, 700), Cols, Rows, blocks),
        ((205, 1100, 300), Rows, Rows, rowwise),
    ] {
        let a = Operand::new(1, (m, k), (Format::E4M3, granularity.0, of_a));
        let b = Operand::new(2, (n, k), (Format::E5M2, granularity.1, of_b));
        for isa in Isa::available() {
            let run = |threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
                let multiply = || multiply::<f32>(isa, &a.row_major(), &b.row_major(), None);
                pool.build().unwrap().install(multiply)
            };
            let one = run(1);
            for threads in [2, 3, 8] {
                assert!(
                    run(threads) == one,
                    "{isa:?} {m}x{n}x{k}, {threads} threads"
                );
            }
        }
    }
}
