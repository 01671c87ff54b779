//! Products of operands in bf16.

use super::super::{bf16_side, multiply_bf16};
use super::*;

/// Values in bf16 as they are stored, and as `[kept, contracted]`.
struct Values {
    stored: Vec<bf16>,
    sizes: (usize, usize),
    contraction: Contraction,
}

impl Values {
    fn random(sizes: (usize, usize), contraction: Contraction, rng: &mut StdRng) -> Self {
        let len = sizes.0 * sizes.1;
        let stored = (0..len).map(|_| bf16::from_f32(rng.random_range(-2f32..2.)));
        Self {
            stored: stored.collect(),
            sizes,
            contraction,
        }
    }

    fn side(&self) -> Side<'_> {
        let (kept, contracted) = self.sizes;
        let stored = match self.contraction {
            Cols => (kept, contracted),
            Rows => (contracted, kept),
        };
        bf16_side(&self.stored, stored, self.contraction)
    }

    fn at(&self, kept: usize, contracted: usize) -> f64 {
        let at = match self.contraction {
            Cols => kept * self.sizes.1 + contracted,
            Rows => contracted * self.sizes.0 + kept,
        };
        self.stored[at].to_f64()
    }

    fn values(&self) -> Vec<f64> {
        let (kept, contracted) = self.sizes;
        let at = |i| (0..contracted).map(move |l| self.at(i, l));
        (0..kept).flat_map(at).collect()
    }
}

const SIZES: [[usize; 3]; 9] = [
    [1, 1, 1],
    [1, 33, 64],
    [3, 16, 31],
    [7, 70, 300],
    [16, 32, 32],
    [65, 97, 257],
    [193, 40, 513],
    [200, 300, 33],
    [400, 65, 600],
];

#[test]
#[cfg_attr(miri, ignore = "takes hours")]
fn sums_are_as_close_as_their_roundings() {
    let mut rng = StdRng::seed_from_u64(1);
    for isa in Isa::available() {
        for [m, n, k] in SIZES {
            for (of_a, of_b) in [(Cols, Cols), (Cols, Rows), (Rows, Rows), (Rows, Cols)] {
                let a = Values::random((m, k), of_a, &mut rng);
                let b = Values::random((n, k), of_b, &mut rng);
                let (a_values, b_values) = (a.values(), b.values());
                let rows = a_values.chunks_exact(k);
                let expected = rows.flat_map(|a| {
                    let columns = b_values.chunks_exact(k);
                    columns.map(move |b| Sum::of(a, b))
                });
                let expected: Vec<Sum> = expected.collect();
                let y = multiply_bf16::<f32>(isa, &a.side(), &b.side());
                let what = format!("{isa:?} {m}x{n}x{k} {of_a:?} {of_b:?}");
                assert_close(&y, &expected, k, &what);
                // Each row is what it is alone.
                if of_a == Cols {
                    let last = Values {
                        stored: a.stored[(m - 1) * k..].to_vec(),
                        sizes: (1, k),
                        contraction: Cols,
                    };
                    let alone = multiply_bf16::<f32>(isa, &last.side(), &b.side());
                    assert_eq!(alone, y[(m - 1) * n..], "{what}: the last row alone");
                }
            }
        }
    }
}

/// The values of FP8 codes, in bf16, give what the codes give, where both are multiplied by the same kernels.
#[test]
#[cfg(target_arch = "x86_64")]
#[cfg_attr(miri, ignore = "takes hours")]
fn values_of_codes_give_what_codes_give() {
    use super::super::engine_bf16::Bf16Engine;
    let mut rng = StdRng::seed_from_u64(2);
    let levels: Vec<Isa> = Isa::available()
        .filter(|&isa| Bf16Engine::of(isa).is_some())
        .collect();
    if levels.is_empty() {
        fp8_test_support::skipped("this processor multiplies no bf16");
    }
    for isa in levels {
        for [m, n, k] in SIZES {
            for (of_a, of_b) in [(Cols, Cols), (Cols, Rows), (Rows, Rows), (Rows, Cols)] {
                let mut side = |sizes: (usize, usize), contraction| {
                    let len = sizes.0 * sizes.1;
                    // Finite codes.
                    let codes =
                        (0..len).map(|_| rng.random_range(0..0x7F) | rng.random_range(0..2) << 7);
                    let codes: Vec<u8> = codes.collect();
                    let of_code = |&code| bf16::from_f32(Format::E4M3.decode(code));
                    let stored = codes.iter().map(of_code).collect();
                    let values = Values {
                        stored,
                        sizes,
                        contraction,
                    };
                    (codes, values)
                };
                let ((a_codes, a), (b_codes, b)) = (side((m, k), of_a), side((n, k), of_b));
                fn of_codes<'a>(values: &'a Values, codes: &'a [u8]) -> Side<'a> {
                    Side {
                        elements: Elements::Codes(codes),
                        ..values.side()
                    }
                }
                let expected =
                    multiply::<f32>(isa, &of_codes(&a, &a_codes), &of_codes(&b, &b_codes), None);
                let y = multiply_bf16::<f32>(isa, &a.side(), &b.side());
                assert_eq!(y, expected, "{isa:?} {m}x{n}x{k} {of_a:?} {of_b:?}");
            }
        }
    }
}
