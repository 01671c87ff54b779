//! Tiles of packed codes against scalar multiply-adds of the decoded codes, to the bit.

use super::super::engine_f32::Tiles;
use super::super::kernel::Sums;
#[cfg(target_arch = "x86_64")]
use super::super::packed_avx2;
use super::super::packed_f32::{Route, TileRows, panels_at_once, reads};
#[cfg(target_arch = "x86_64")]
use super::super::tile_f32::{Avx2, Avx512};
#[cfg(target_arch = "aarch64")]
use super::super::tile_neon::Neon;
use super::*;

/// A way to multiply a tile.
struct Way {
    route: Route,
    multiply: Multiply,
}

type Multiply = fn(Format, usize, TileRows<'_>, &[&[u8]], &mut Sums<'_>, bool);

#[cfg(target_arch = "aarch64")]
#[test]
fn tiles_of_packed_codes_equal_scalar_sums() {
    assert!(Isa::available().any(|isa| isa.level() == Neon::LEVEL));
    check::<Neon>(&Way {
        route: Route::Shift,
        // SAFETY: this processor has NEON.
        multiply: |format, rows, a, codes, sums, add| unsafe {
            Neon::multiply_packed(format, rows, a, codes, sums, add)
        },
    });
}

#[cfg(target_arch = "x86_64")]
#[test]
fn tiles_of_packed_codes_equal_scalar_sums() {
    let has = |level| Isa::available().any(|isa| isa.level() == level);
    if has(Avx2::LEVEL) {
        macro_rules! way {
            ($route:expr) => {
                check::<Avx2>(&Way {
                    route: $route,
                    // SAFETY: this processor has AVX2.
                    multiply: |format, rows, a, codes, sums, add| unsafe {
                        packed_avx2::multiply((format, $route), rows, a, codes, sums, add)
                    },
                })
            };
        }
        way!(Route::Half);
        way!(Route::Shift);
    }
    if has(Avx512::LEVEL) {
        check::<Avx512>(&Way {
            route: Route::Half,
            // SAFETY: this processor has AVX-512.
            multiply: |format, rows, a, codes, sums, add| unsafe {
                Avx512::multiply_packed(format, rows, a, codes, sums, add)
            },
        });
    } else {
        println!("skipped: no {}", Avx512::LEVEL.name());
    }
}

fn check<T: Tiles>(way: &Way) {
    let route = way.route;
    let width = T::ORDER.panel();
    let mut rng = StdRng::seed_from_u64(5);
    for format in [Format::E4M3, Format::E5M2] {
        // Subnormal codes and zeros are as frequent as others.
        let finite: Vec<u8> = (0..=255)
            .filter(|&code| format.decode(code).is_finite())
            .collect();
        for rows in 1..=T::ROWS {
            for panels in 1..=panels_at_once(rows) {
                for (skip, k, spread) in [(0, 32, 0), (64, 64, 9), (0, 256, 30), (224, 576, 9)] {
                    let what = format!(
                        "{} {route:?} {format} {rows} x {panels}, {skip} + {k}",
                        T::LEVEL.name()
                    );
                    let n = panels * width;
                    let codes: Vec<u8> = (0..n * k)
                        .map(|_| finite[rng.random_range(0..finite.len())])
                        .collect();
                    // Small values of the format that reaches farthest down, and its largest.
                    let a: Vec<f32> = (0..k * rows)
                        .map(|_| {
                            let code = rng.random_range(0..=4 * spread + 2);
                            Format::E5M2Fnuz.decode(code as u8)
                        })
                        .collect();
                    let start: Vec<f32> = (0..rows * n).map(|i| i as f32 * 0.37 - 1.).collect();
                    for add in [false, true] {
                        let mut expected = start.clone();
                        for (row, sums) in expected.chunks_exact_mut(n).enumerate() {
                            for (col, sum) in sums.iter_mut().enumerate() {
                                *sum = if add { *sum } else { 0. };
                                for index in 0..k {
                                    let value = format.decode(codes[col * k + index]);
                                    *sum = a[index * rows + row].mul_add(value, *sum);
                                }
                            }
                        }
                        let got = run::<T>(way, (format, rows), (&a, skip), &codes, &start, add);
                        let bits =
                            |sums: &[f32]| sums.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                        assert!(bits(&got) == bits(&expected), "{what}, add {add}");
                    }
                }
            }
        }
    }
}

/// The sums of row-major codes.
fn run<T: Tiles>(
    way: &Way,
    (format, rows): (Format, usize),
    (a, skip): (&[f32], usize),
    codes: &[u8],
    start: &[f32],
    add: bool,
) -> Vec<f32> {
    let k = a.len() / rows;
    let n = codes.len() / k;
    let packed = pack_codes(T::ORDER, codes, n, k);
    let panels: Vec<&[u8]> = packed.chunks_exact(k * T::ORDER.panel()).collect();
    // Slices lie apart, as in a product with other tiles.
    let next_slice = rows * SLICE + 40;
    let mut values = vec![f32::NAN; (skip + k).div_ceil(SLICE) * next_slice];
    for (index, a) in a.chunks_exact(rows).enumerate() {
        let (slice, index) = ((skip + index) / SLICE, (skip + index) % SLICE);
        values[slice * next_slice + index * rows..][..rows].copy_from_slice(a);
    }
    let a = TileRows {
        values: &values,
        skip,
        next_slice,
    };
    let mut sums = start.to_vec();
    let to = &mut Sums {
        values: &mut sums,
        stride: n,
    };
    (way.multiply)(format, rows, a, &panels, to, add);
    sums
}

/// Codes that tiles read have finite values, and all such codes are read.
#[test]
fn what_is_not_finite_is_not_packed() {
    for format in [Format::E4M3, Format::E5M2] {
        for code in 0..=255 {
            let codes = [0x38, code, 0];
            assert_eq!(
                reads(format, &codes),
                format.decode(code).is_finite(),
                "{format} {code:#x}"
            );
        }
    }
    for format in [Format::E4M3Fnuz, Format::E5M2Fnuz] {
        assert!(!reads(format, &[0x38]), "{format}");
    }
}
