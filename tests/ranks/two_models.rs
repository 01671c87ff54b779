//! Steps of ranks with two models, for ranks that are threads and for ranks that are processes.

use candle_core::Module;
use fp8::ranks::ProcessGroup;
use fp8::{Autocast, AutocastGuard, end_step, fp8_autocast};
use fp8_test_support::{Layer, Slot, delayed, slots, tensor};
use std::sync::Arc;

/// A guard whose amaxes are those of all ranks.
pub fn open(group: &ProcessGroup) -> AutocastGuard {
    let group = Arc::new(group.clone());
    fp8_autocast(Autocast::new(delayed(4)).reduction_group(group)).unwrap()
}

/// A training step of some layers on this rank's own data.
pub fn train(group: &ProcessGroup, step: u64, layers: &[&Layer]) -> fp8::Result<()> {
    let guard = open(group);
    let mut losses = vec![];
    for layer in layers {
        let x = tensor(10 + group.rank() as u64 + 7 * step, &[5, 8]);
        let y = layer.linear.try_forward(&x)?;
        losses.push(y.sqr()?.sum_all()?);
    }
    for loss in losses {
        loss.backward()?;
    }
    guard.close()?;
    Ok(())
}

/// Two layers, each a model of its own.
pub fn two() -> [Layer; 2] {
    [("a", 1), ("b", 3)].map(|(path, seed)| Layer::prepared(path, seed, 4, 8))
}

/// A step of all ranks, one that rank 1 aborts, and the next.
pub fn one_rank_aborts(group: &ProcessGroup) -> fp8::Result<()> {
    let [a, b] = two();
    train(group, 0, &[&a, &b])?;
    let guard = open(group);
    a.linear.forward(&tensor(5, &[5, 8]))?;
    if group.rank() == 1 {
        guard.abort();
    } else {
        guard.close()?;
    }
    train(group, 2, &[&a, &b])
}

/// Whether the error of [`one_rank_aborts`], on `rank` of so many, says what went wrong.
pub fn names_the_aborted_step(error: &str, rank: usize, ranks: usize) {
    let told = (0..ranks).map(|rank| {
        let steps = if rank == 1 { 2 } else { 1 };
        format!("rank {rank}: inputs and weights after {steps} steps")
    });
    let told = told.collect::<Vec<_>>().join("; ");
    for text in ["all_reduce_max", "a.input", &told, "abort the same steps"] {
        assert!(error.contains(text), "rank {rank}: no {text:?} in {error}");
    }
}

/// Four steps of all ranks, and the state after them; with `abort`, each is followed by one that all ranks abort.
pub fn all_ranks_abort(group: &ProcessGroup, abort: bool) -> Vec<[Slot; 3]> {
    let [a, b] = two();
    for step in 0..4 {
        train(group, step, &[&a, &b]).unwrap();
        if abort {
            let guard = open(group);
            b.linear.forward(&tensor(50 + step, &[5, 8])).unwrap();
            guard.abort();
        }
    }
    end_step().unwrap();
    vec![slots(&a.linear), slots(&b.linear)]
}
