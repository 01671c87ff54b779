//! Tiles of packed codes against scalar multiply-adds of the decoded codes, to the bit.

use super::super::engine_f32::Tiles;
use super::super::kernel::Sums;
#[cfg(target_arch = "x86_64")]
use super::super::packed_avx2;
use super::super::packed_f32::{CHECKED_ROWS, Route, panels_at_once};
#[cfg(target_arch = "x86_64")]
use super::super::tile_f32::{Avx2, Avx512};
#[cfg(target_arch = "aarch64")]
use super::super::tile_neon::Neon;
use super::*;

/// A way to multiply a tile.
struct Way {
    route: Route,
    decodes: fn(Format, &[u8]) -> bool,
    multiply: Multiply,
}

type Multiply = fn(Format, usize, &[f32], &[&[u8]], &mut Sums<'_>, bool) -> bool;

#[cfg(target_arch = "aarch64")]
#[test]
fn tiles_of_packed_codes_equal_scalar_sums() {
    assert!(Isa::available().any(|isa| isa.level() == Neon::LEVEL));
    check::<Neon>(&Way {
        route: Route::Shift,
        // SAFETY: this processor has NEON.
        decodes: |format, codes| unsafe { Neon::decodes(format, codes) },
        // SAFETY: as above.
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
                    decodes: |format, codes| unsafe {
                        packed_avx2::decodes((format, $route), codes)
                    },
                    // SAFETY: as above.
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
            decodes: |format, codes| unsafe { Avx512::decodes(format, codes) },
            // SAFETY: as above.
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
                for (k, spread) in [(32, 0), (64, 9), (256, 30)] {
                    let what = format!(
                        "{} {route:?} {format} {rows} x {panels}, {k}",
                        T::LEVEL.name()
                    );
                    let n = panels * width;
                    let mut codes: Vec<u8> = (0..n * k)
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
                        let got = run::<T>(way, (format, rows), &a, &codes, &start, add);
                        let got = got.unwrap_or_else(|| panic!("{what}: refused"));
                        let bits =
                            |sums: &[f32]| sums.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                        assert!(bits(&got) == bits(&expected), "{what}, add {add}");
                    }
                    // One code that is not finite: refused, or the right sums.
                    let special = if format == Format::E4M3 { 0xFF } else { 0x7C };
                    codes[n * k - 1] = special;
                    if let Some(sums) = run::<T>(way, (format, rows), &a, &codes, &start, true) {
                        let last = a[k * rows - 1] * format.decode(special);
                        let got = sums[rows * n - 1];
                        assert!(
                            got == last || got.is_nan() && last.is_nan(),
                            "{what}: {got}"
                        );
                        assert!(format == Format::E5M2 && route == Route::Half, "{what}");
                    }
                }
            }
        }
    }
}

/// The sums of row-major codes; None if the kernel leaves them to another, which must not change any.
fn run<T: Tiles>(
    way: &Way,
    (format, rows): (Format, usize),
    a: &[f32],
    codes: &[u8],
    start: &[f32],
    add: bool,
) -> Option<Vec<f32>> {
    let k = a.len() / rows;
    let n = codes.len() / k;
    let packed = pack_codes(T::ORDER, codes, n, k);
    let panels: Vec<&[u8]> = packed.chunks_exact(k * T::ORDER.panel()).collect();
    let mut sums = start.to_vec();
    let to = &mut Sums {
        values: &mut sums,
        stride: n,
    };
    let decodes = || panels.iter().all(|codes| (way.decodes)(format, codes));
    let done =
        (rows <= CHECKED_ROWS || decodes()) && (way.multiply)(format, rows, a, &panels, to, add);
    assert!(done || sums == start);
    done.then_some(sums)
}
