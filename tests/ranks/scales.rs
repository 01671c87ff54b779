//! Scales of ranks that use different layers and models, and errors of ranks that disagree about what they do.

use crate::two_models::{
    all_ranks_abort, names_the_aborted_step, one_rank_aborts, open, train, two,
};
use candle_core::{Module, Tensor};
use fp8::ranks::ProcessGroup;
use fp8::ranks::threads::{self, Threads};
use fp8::{Autocast, end_step, fp8_autocast};
use fp8_test_support::{Layer, Slot, delayed, slots, tensor};
use std::sync::Arc;
use std::time::Duration;

fn all_equal(ranks: Vec<Vec<[Slot; 3]>>, case: &str) -> Vec<[Slot; 3]> {
    for other in &ranks[1..] {
        assert_eq!(*other, ranks[0], "{case}");
    }
    ranks.into_iter().next().unwrap()
}

/// After a first step with both models, each rank uses one of them, in turns, or none.
#[test]
fn a_model_that_a_rank_does_not_use_keeps_the_scales_of_the_others() {
    for ranks in [2, 3] {
        let states = threads::run(ranks, |group| {
            let [a, b] = two();
            train(&group, 0, &[&a, &b]).unwrap();
            for step in 1..7 {
                let used: &[&Layer] = match (step + group.rank() as u64) % 3 {
                    0 => &[&a],
                    // In another order than their names.
                    1 => &[&b, &a],
                    _ => &[],
                };
                train(&group, step, used).unwrap();
            }
            end_step().unwrap();
            vec![slots(&a.linear), slots(&b.linear)]
        });
        let [a, b] = &all_equal(states, "ranks")[..] else {
            panic!("two models");
        };
        // The weight does not change, so its amax is recorded once.
        for slot in [&a[0], &a[2], &b[0], &b[2]] {
            assert!(
                slot.history.iter().filter(|&&amax| amax > 0.).count() > 1,
                "{slot:?}"
            );
        }
    }
}

/// Models that take turns in guards of their own, on all ranks alike: their histories are those of one process.
#[test]
fn a_model_that_no_rank_uses_is_not_updated() {
    let run = |group: &ProcessGroup| {
        let [a, b] = two();
        for step in 0..6 {
            train(group, 3 * step, &[if step % 2 == 0 { &a } else { &b }]).unwrap();
        }
        end_step().unwrap();
        vec![slots(&a.linear), slots(&b.linear)]
    };
    let alone = run(&ProcessGroup::single());
    let filled = |slot: &Slot| slot.history.iter().all(|&amax| amax > 0.);
    assert!(
        !alone.iter().flatten().all(filled),
        "three steps of four entries"
    );
    let states = threads::run(2, |group| run(&group));
    for state in all_equal(states, "turns").iter().zip(&alone) {
        let entries = |slots: &[Slot; 3]| {
            let used = slots
                .iter()
                .map(|slot| slot.history.iter().filter(|&&amax| amax > 0.).count());
            used.collect::<Vec<_>>()
        };
        assert_eq!(entries(state.0), entries(state.1));
    }
}

#[test]
fn a_step_that_one_rank_aborts_is_an_error_on_all() {
    let job = Threads::new(3).with_deadline(Duration::from_secs(120));
    let results = job.run(|group| one_rank_aborts(&group));
    for (rank, result) in results.into_iter().enumerate() {
        let error = result.expect("no panic").expect_err("an error").to_string();
        names_the_aborted_step(&error, rank, 3);
    }
}

#[test]
fn steps_that_all_ranks_abort_leave_no_trace() {
    let states = threads::run(2, |group| all_ranks_abort(&group, true));
    let plain = threads::run(2, |group| all_ranks_abort(&group, false));
    assert_eq!(states, plain);
}

#[test]
fn ranks_whose_models_differ_get_an_error() {
    let job = Threads::new(2).with_deadline(Duration::from_secs(120));
    let results = job.run(|group| {
        let path = ["left", "right"][group.rank()];
        let layer = Layer::prepared(path, 1, 4, 8);
        train(&group, 0, &[&layer])
    });
    for (result, path) in results.into_iter().zip(["left", "right"]) {
        let error = result.expect("no panic").expect_err("an error").to_string();
        for text in [&format!("`{path}.input`"), "of another model"] {
            assert!(error.contains(text), "{error}");
        }
    }
}

/// Inf and NaN are counted where they are; no scale is made from them, on any rank.
#[test]
fn nan_on_one_rank_leaves_all_scales_equal() {
    for bad in [f32::NAN, f32::INFINITY] {
        let states = threads::run(2, |group| {
            let [a, b] = two();
            train(&group, 0, &[&a, &b]).unwrap();
            let guard = open(&group);
            let x = tensor(20 + group.rank() as u64, &[5, 8]);
            let x = match group.rank() {
                0 => x,
                _ => (x * f64::from(bad)).unwrap(),
            };
            a.linear.forward(&x).unwrap();
            guard.close().unwrap();
            train(&group, 2, &[&a, &b]).unwrap();
            end_step().unwrap();
            let of =
                |layer: &Layer| slots(&layer.linear).map(|slot| (slot.quant_scale, slot.history));
            (of(&a), of(&b))
        });
        assert_eq!(states[0], states[1], "{bad}");
        assert!(states[0].0.iter().all(|(scale, _)| scale.is_finite()));
    }
}

#[test]
fn two_reductions_a_step_and_table() {
    let calls = threads::run(2, |group| {
        let [a, b] = two();
        train(&group, 0, &[&a, &b]).unwrap();
        group.reset_traffic();
        for step in 1..11 {
            train(&group, step, &[&a, &b]).unwrap();
        }
        group.traffic()
    });
    for traffic in calls {
        let amaxes = traffic.of(fp8::ranks::Operation::AllReduceMax);
        assert_eq!(amaxes.calls, 2 * 2 * 10, "{traffic:?}");
    }
}

/// Guards that evaluate, on one rank only, do not disturb.
#[test]
fn one_rank_alone_may_evaluate() {
    let states = threads::run(2, |group| {
        let [a, _] = two();
        for step in 0..3 {
            train(&group, step, &[&a]).unwrap();
            if group.rank() == 0 {
                let guard = Autocast::new(delayed(4)).training(false);
                let guard = guard.reduction_group(Arc::new(group.clone()));
                let guard = fp8_autocast(guard).unwrap();
                let x: Tensor = tensor(40, &[5, 8]);
                a.linear.forward(&x).unwrap();
                guard.close().unwrap();
            }
        }
        end_step().unwrap();
        vec![slots(&a.linear)]
    });
    all_equal(states, "evaluation");
}

/// Guards hold handles of their own; layers used under different handles are still reduced together.
#[test]
fn handles_of_one_group_are_one_group() {
    let calls = threads::run(2, |group| {
        let layer = |path, seed| Layer::new(path, seed, 4, 8).linear;
        let mut model = (layer("a", 1), layer("b", 3));
        fp8_test_support::prepare(&mut model);
        group.reset_traffic();
        for step in 0..3 {
            let outer = open(&group);
            for layer in [&model.0, &model.1] {
                let inner = open(&group);
                // Each rank leaves out a layer, in turns.
                if step == 0 || (step + group.rank()) % 2 == 0 || std::ptr::eq(layer, &model.0) {
                    layer.forward(&tensor(step as u64, &[5, 8])).unwrap();
                }
                inner.close().unwrap();
            }
            outer.close().unwrap();
        }
        group
            .traffic()
            .of(fp8::ranks::Operation::AllReduceMax)
            .calls
    });
    // One for each step, and the gradients of the two steps before others.
    assert_eq!(calls, [5, 5]);
}
