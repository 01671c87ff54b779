//! Every level against scalar sums in lanes, to the bit.

use super::*;
use crate::base::math::Real;
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::sync::Mutex;

/// Rows of `k` values.
fn rows_of<V: Copy + Sync>(values: &[V], k: usize) -> impl Rows<V> {
    move |rows: Range<usize>, stride: usize, dst: &mut [V]| {
        for (row, dst) in rows.zip(dst.chunks_mut(stride)) {
            dst[..k].copy_from_slice(&values[row * k..(row + 1) * k]);
        }
    }
}

fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..len).map(|_| rng.random_range(-1f32..1.)).collect()
}

/// A sum as the head of the module and [`Tiles::total`] define it.
fn dot<V: Real>(x: &[V], w: &[V], fuses: bool) -> V {
    let mut lanes = [V::ZERO; LANES];
    let padded = x.len().next_multiple_of(LANES);
    for l in 0..padded {
        let (x, w) = match x.get(l) {
            Some(&x) => (x, w[l]),
            None => (V::ZERO, V::ZERO),
        };
        let lane = &mut lanes[l % LANES];
        *lane = match fuses {
            true => x.mul_add(w, *lane),
            false => x * w + *lane,
        };
    }
    for width in [8, 4, 2, 1] {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
    }
    lanes[0]
}

/// Collects what `run` finishes, each element once.
fn collected<V: Real>(
    (m, n): (usize, usize),
    run: impl FnOnce(&(dyn Fn(usize, usize, &[V]) + Sync)),
) -> Vec<V> {
    let y = Mutex::new(vec![None; m * n]);
    run(&|row, col, sums| {
        let mut y = y.lock().unwrap();
        for (i, &sum) in sums.iter().enumerate() {
            assert!(y[row * n + col + i].replace(sum).is_none());
        }
    });
    y.into_inner()
        .unwrap()
        .into_iter()
        .map(|y| y.expect("finished"))
        .collect()
}

const SIZES: [(usize, usize, usize); 16] = [
    (0, 3, 4),
    (3, 0, 4),
    (2, 3, 0),
    (1, 1, 1),
    (1, 6, 16),
    (2, 7, 15),
    (3, 5, 17),
    (4, 6, 33),
    (5, 13, 256),
    (6, 97, 31),
    (7, 12, SLICE - 1),
    (9, 7, SLICE),
    (5, 8, SLICE + 1),
    (13, 7, 2 * SLICE + 40),
    (130, 200, 64),
    (70, 20, 2100),
];

#[test]
fn every_level_sums_as_defined() {
    for (m, n, k) in SIZES {
        let (x, w) = (random(1, m * k), random(2, n * k));
        for isa in Isa::available() {
            let y = collected((m, n), |finish| {
                product(
                    isa,
                    Sizes { m, n, k },
                    rows_of(&x, k),
                    (rows_of(&w, k), None::<&[f32]>),
                    finish,
                );
            });
            let fuses =
                isa.level() != fp8_core::IsaLevel::Portable || cfg!(target_arch = "aarch64");
            for (at, y) in y.iter().enumerate() {
                let (row, col) = (at / n, at % n);
                let expected = dot(&x[row * k..][..k], &w[col * k..][..k], fuses);
                assert_eq!(
                    y.to_bits(),
                    expected.to_bits(),
                    "{isa:?} {m} {n} {k}: [{row}, {col}]"
                );
            }
        }
    }
}

/// Few rows read `stored` where it lies; for more rows and other lengths it may be packed. Either way the bits are those of packed f32.
fn reads_where_it_lies<W: Held>(stored: impl Fn(f32) -> W) {
    let sizes = [
        (1, 1, 16),
        (1, 6, 576),
        (2, 13, 32),
        (3, 12, SLICE + 16),
        (4, 7, 2 * SLICE),
        (8, 25, 48),
        (9, 6, 64),
        (1, 12, 33),
        (0, 6, 16),
        (2, 0, 16),
        (2, 6, 0),
    ];
    for (m, n, k) in sizes {
        let x = random(3, m * k);
        let stored: Vec<W> = random(4, n * k).into_iter().map(&stored).collect();
        let w: Vec<f32> = stored.iter().map(|&w| w.widen()).collect();
        for isa in Isa::available() {
            let run = |held: Option<&[W]>| {
                collected((m, n), |finish| {
                    let w = (rows_of(&w, k), held);
                    product(isa, Sizes { m, n, k }, rows_of(&x, k), w, finish);
                })
            };
            let bits = |y: Vec<f32>| y.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            let (held, packed) = (bits(run(Some(&stored))), bits(run(None)));
            assert_eq!(held, packed, "{isa:?} {m} {n} {k}");
        }
    }
}

#[test]
fn a_few_rows_read_each_type_where_it_lies() {
    reads_where_it_lies(|w| w);
    reads_where_it_lies(half::bf16::from_f32);
    // Some of them subnormal in f16.
    reads_where_it_lies(|w| half::f16::from_f32(w * 1e-4));
}

#[test]
fn f64_sums_as_defined() {
    for (m, n, k) in SIZES {
        let wide = |values: Vec<f32>| values.into_iter().map(f64::from).collect::<Vec<_>>();
        let (x, w) = (wide(random(1, m * k)), wide(random(2, n * k)));
        let y = collected((m, n), |finish| {
            product_f64(Sizes { m, n, k }, rows_of(&x, k), rows_of(&w, k), finish);
        });
        for (at, &y) in y.iter().enumerate() {
            let (row, col) = (at / n, at % n);
            let fuses = cfg!(target_arch = "aarch64");
            let expected = dot(&x[row * k..][..k], &w[col * k..][..k], fuses);
            assert_eq!(
                y.to_bits(),
                expected.to_bits(),
                "{m} {n} {k}: [{row}, {col}]"
            );
        }
    }
}

#[test]
fn more_rows_than_are_packed_at_once() {
    let (m, n, k) = (700, 3, 16_000);
    let (x, w) = (random(1, m * k), random(2, n * k));
    let isa = Isa::best();
    let run = |first: usize, m: usize| {
        collected((m, n), |finish| {
            let x = rows_of(&x[first * k..], k);
            let w = (rows_of(&w, k), None::<&[f32]>);
            product(isa, Sizes { m, n, k }, x, w, finish);
        })
    };
    let all = run(0, m);
    for row in [0, 1, 522, 523, 524, 525, 699] {
        assert_eq!(run(row, 1), all[row * n..][..n], "row {row}");
    }
}
