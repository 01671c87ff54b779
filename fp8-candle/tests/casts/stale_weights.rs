//! Cached codes are not used after the weight has changed.

use candle_core::{Tensor, Var};
use fp8_candle::{CastCounter, Quantizer, Result, WeightCache};
use fp8_core::{Contraction, Format, Granularity};
use fp8_test_support::{device, skipped_on_cuda};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::sync::atomic::Ordering;

/// Weights with little structure, which makes changes hard to tell apart.
fn weights(rng: &mut StdRng, n: usize, k: usize) -> [(&'static str, Vec<f32>); 4] {
    let len = n * k;
    [
        (
            "random",
            (0..len).map(|_| rng.random_range(-1.0..1.0)).collect(),
        ),
        (
            "signs",
            (0..len)
                .map(|_| if rng.random() { 1. } else { -1. })
                .collect(),
        ),
        ("ones", vec![1.; len]),
        ("zeros", vec![0.; len]),
    ]
}

/// A change, by name; `None` if it does not change these values.
fn changed(kind: &str, w: &[f32], k: usize, rng: &mut StdRng) -> Option<Vec<f32>> {
    let n = w.len() / k;
    let mut new = w.to_vec();
    match kind {
        "negated" => new.iter_mut().for_each(|x| *x = -*x),
        "power of two" => {
            let factor = 2f32.powi(rng.random_range(1..8));
            new.iter_mut().for_each(|x| *x *= factor);
        }
        "half" => new.iter_mut().for_each(|x| *x *= 0.5),
        "row negated" => {
            let row = rng.random_range(0..n);
            new[row * k..(row + 1) * k]
                .iter_mut()
                .for_each(|x| *x = -*x);
        }
        "column negated" => {
            let column = rng.random_range(0..k);
            new.iter_mut()
                .skip(column)
                .step_by(k)
                .for_each(|x| *x = -*x);
        }
        "every second row negated" => {
            for row in new.chunks_mut(k).step_by(2) {
                row.iter_mut().for_each(|x| *x = -*x);
            }
        }
        "two swapped" => {
            let (i, j) = (rng.random_range(0..w.len()), rng.random_range(0..w.len()));
            new.swap(i, j);
        }
        "two rows swapped" => {
            let (i, j) = (rng.random_range(0..n), rng.random_range(0..n));
            for column in 0..k {
                new.swap(i * k + column, j * k + column);
            }
        }
        "permuted" => new.shuffle(rng),
        "rotated" => new.rotate_left(rng.random_range(1..w.len())),
        "one sign" => {
            let at = rng.random_range(0..w.len());
            new[at] = -new[at];
        }
        "one bit" => {
            let at = rng.random_range(0..w.len());
            new[at] = f32::from_bits(new[at].to_bits() ^ (1 << rng.random_range(0..31)));
        }
        "two bits" => {
            for _ in 0..2 {
                let at = rng.random_range(0..w.len());
                new[at] = f32::from_bits(new[at].to_bits() ^ (1 << 31));
            }
        }
        _ => new.iter_mut().for_each(|x| *x += 1.),
    }
    let same = new.iter().zip(w).all(|(a, b)| a.to_bits() == b.to_bits());
    (!same).then_some(new)
}

#[test]
fn no_change_goes_unseen() -> Result<()> {
    if skipped_on_cuda("a change of the weight is not known without a copy to the host") {
        return Ok(());
    }
    let kinds = [
        "negated",
        "power of two",
        "half",
        "row negated",
        "column negated",
        "every second row negated",
        "two swapped",
        "two rows swapped",
        "permuted",
        "rotated",
        "one sign",
        "one bit",
        "two bits",
        "shifted",
    ];
    let mut rng = StdRng::seed_from_u64(11);
    let (mut changes, mut stale) = (0, vec![]);
    for (n, k) in [(1, 16), (3, 5), (16, 16), (64, 64), (48, 96), (128, 256)] {
        for round in 0..18 {
            for (name, values) in weights(&mut rng, n, k) {
                let weight = Var::from_tensor(&Tensor::from_slice(&values, (n, k), &device())?)?;
                let cache = WeightCache::default();
                let counter = CastCounter::default();
                let quantizer = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise)
                    .with_counter(counter.clone());
                cache.quantize(&weight, &quantizer, Contraction::Cols)?;
                let mut now = values;
                for kind in kinds {
                    let Some(new) = changed(kind, &now, k, &mut rng) else {
                        continue;
                    };
                    now = new;
                    weight.set(&Tensor::from_slice(&now, (n, k), &device())?)?;
                    let before = counter.load(Ordering::Relaxed);
                    cache.quantize(&weight, &quantizer, Contraction::Cols)?;
                    changes += 1;
                    if counter.load(Ordering::Relaxed) == before {
                        stale.push(format!("{name} {n}x{k}, round {round}: {kind}"));
                    }
                }
            }
        }
    }
    println!("{changes} changes, {} stale", stale.len());
    assert!(changes >= 4000, "{changes}");
    assert!(stale.is_empty(), "{} of {changes}: {stale:#?}", stale.len());
    Ok(())
}
