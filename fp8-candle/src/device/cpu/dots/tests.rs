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
                    rows_of(&w, k),
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
            product(isa, Sizes { m, n, k }, x, rows_of(&w, k), finish);
        })
    };
    let all = run(0, m);
    for row in [0, 1, 522, 523, 524, 525, 699] {
        assert_eq!(run(row, 1), all[row * n..][..n], "row {row}");
    }
}
