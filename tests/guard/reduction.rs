//! The reduction group: what it receives, when it is called, and what follows an error.

use crate::helpers::*;
use candle_core::{Module, Tensor};
use fp8::config::Recipe;
use fp8::{
    Autocast, Error, GuardError, ReductionGroup, SingleProcess, end_step, fp8_autocast,
    is_fp8_enabled,
};
use fp8_test_support::{Layer, assert_text, delayed, of, prepare, slots};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

/// A group of two ranks. The other one always reports `other`, cut or repeated to the length that is needed.
#[derive(Debug)]
struct TwoRanks {
    other: Vec<f32>,
    calls: Mutex<Vec<Vec<f32>>>,
}

impl TwoRanks {
    fn new(other: &[f32]) -> Arc<Self> {
        Arc::new(Self {
            other: other.to_vec(),
            calls: Mutex::default(),
        })
    }

    fn calls(&self) -> Vec<Vec<f32>> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }
}

impl ReductionGroup for TwoRanks {
    fn ranks(&self) -> usize {
        2
    }

    fn all_reduce_max(&self, amaxes: &Tensor) -> fp8::fp8_candle::Result<Tensor> {
        let mut mine = amaxes.to_vec1::<f32>()?;
        // The last three entries are the check, which the other rank passes.
        let check = mine.split_off(mine.len() - 3);
        self.calls.lock().unwrap().push(mine.clone());
        let others = self.other.iter().cycle();
        let max = mine.iter().zip(others).map(|(a, b)| a.max(*b));
        let max: Vec<f32> = max.chain(check).collect();
        Ok(Tensor::from_vec(max, mine.len() + 3, amaxes.device())?)
    }
}

#[test]
fn the_reduction_group_gets_the_amaxes_of_the_whole_model() {
    let (mut a, mut b) = (Layer::new("a", 200, 1, 2), Layer::new("b", 202, 1, 2));
    let mut model = (a.linear.clone(), b.linear.clone());
    prepare(&mut model);
    (a.linear, b.linear) = model;
    a.weight.set(&of(&[0.5, 0.], &[1, 2])).unwrap();
    b.weight.set(&of(&[0.25, 0.], &[1, 2])).unwrap();
    let group = TwoRanks::new(&[1., 0.125, 1., 16., 0., 0.]);
    let guard = open(Autocast::new(delayed(2)).reduction_group(group.clone()));
    // The layers are used in another order than that of their names.
    let y = b.linear.forward(&of(&[4., 0.], &[1, 2])).unwrap();
    let z = a.linear.forward(&of(&[2., 0.], &[1, 2])).unwrap();
    assert!(group.calls().is_empty(), "no call while the guard is open");
    guard.close().unwrap();
    assert_eq!(
        group.calls(),
        [[2., 0.5, 0., 4., 0.25, 0.]],
        "input, weight, grad_output of a, then of b"
    );
    backward(&y, &of(&[32.], &[1, 1]));
    backward(&z, &of(&[0.5], &[1, 1]));
    assert!(group.calls().is_empty(), "gradients wait");
    end_step().unwrap();
    assert_eq!(group.calls(), [[0., 0., 0.5, 0., 0., 32.]], "gradients");
    let history = |layer: &Layer, role: &str| layer.slot(role).history[0];
    assert_eq!(
        (history(&a, "input"), history(&a, "weight")),
        (2., 0.5),
        "mine are larger"
    );
    assert_eq!(
        (history(&b, "input"), history(&b, "weight")),
        (16., 0.25),
        "b.input of the other"
    );
    assert_eq!(
        (history(&a, "grad_output"), history(&b, "grad_output")),
        (1., 32.)
    );
    assert_eq!(
        b.slot("input").quant_scale,
        28.,
        "the scale is made of the maximum"
    );
}

#[test]
fn the_reduction_group_is_not_called_if_there_is_nothing_to_reduce() {
    let x = of(&[2., 1.], &[1, 2]);
    let go = of(&[1., 1.], &[1, 2]);
    let cases: [(&str, Recipe, bool, bool); 5] = [
        ("delayed", delayed(2).into(), true, true),
        (
            "delayed, reduce_amax off",
            delayed(2).with_reduce_amax(false).into(),
            true,
            false,
        ),
        ("delayed, evaluation", delayed(2).into(), false, false),
        ("tensorwise", recipe("tensorwise"), true, false),
        ("rowwise", recipe("rowwise"), true, false),
    ];
    for (case, recipe, training, called) in cases {
        let layer = Layer::prepared("fc", 205, 2, 2);
        let group = TwoRanks::new(&[64.]);
        let autocast = Autocast::new(recipe)
            .training(training)
            .reduction_group(group.clone());
        train(&layer, autocast, &x, &go);
        end_step().unwrap();
        assert_eq!(!group.calls().is_empty(), called, "{case}: called");
        let stored = layer.slot("input").history.contains(&64.);
        assert_eq!(stored, called, "{case}: the other rank's amax");
    }
    let layer = Layer::prepared("fc", 205, 2, 2);
    let autocast = Autocast::new(delayed(2)).reduction_group(Arc::new(SingleProcess));
    train(&layer, autocast, &x, &go);
    assert_eq!(
        layer.slot("input").history,
        [2., 0.],
        "a job of one process"
    );
}

#[test]
fn the_reduction_group_of_the_innermost_guard_counts() {
    let (outer, inner) = (TwoRanks::new(&[8.]), TwoRanks::new(&[16.]));
    let with = |group: &Arc<TwoRanks>| Autocast::new(delayed(2)).reduction_group(group.clone());
    for (case, guards, expected) in [
        ("two groups", vec![with(&outer), with(&inner)], 16.),
        ("none outside", vec![delayed(2).into(), with(&inner)], 16.),
        ("none inside", vec![with(&outer), delayed(2).into()], 2.),
    ] {
        let layer = Layer::prepared("fc", 207, 2, 2);
        let mut nest = Nest::open(&guards);
        layer.linear.forward(&of(&[2., 0.], &[1, 2])).unwrap();
        while let Some(guard) = nest.0.pop() {
            guard.close().unwrap();
        }
        assert_eq!(layer.slot("input").history[0], expected, "{case}");
    }
}

#[derive(Debug)]
struct Broken;

impl ReductionGroup for Broken {
    fn ranks(&self) -> usize {
        2
    }

    fn all_reduce_max(&self, _: &Tensor) -> fp8::fp8_candle::Result<Tensor> {
        Err(fp8::fp8_candle::Error::Group(
            "rank 1 does not answer".into(),
        ))
    }
}

#[test]
fn close_reports_what_drop_only_logs() {
    let layer = Layer::prepared("fc", 208, 2, 2);
    let x = of(&[2., 0.], &[1, 2]);
    let autocast = || Autocast::new(delayed(2)).reduction_group(Arc::new(Broken));
    let guard = open(autocast());
    layer.linear.forward(&x).unwrap();
    assert_text(
        "close",
        guard.close().unwrap_err(),
        &["rank 1 does not answer"],
    );
    // The gradients of that step are reduced when the layer is used next, which then reports the error.
    let guard = open(autocast());
    let error = layer.linear.forward(&x).unwrap_err();
    assert_text("forward", error, &["rank 1 does not answer"]);
    guard.abort();
    let other = Layer::prepared("other", 208, 2, 2);
    {
        let _guard = open(autocast());
        // All ranks reduce what is due before anything else, whatever this one uses now.
        let error = other.linear.forward(&x).unwrap_err();
        assert_text(
            "forward of another model",
            error,
            &["rank 1 does not answer"],
        );
    }
    assert!(!is_fp8_enabled(), "and the guard is gone either way");
    let error = fp8_autocast(autocast()).unwrap_err();
    assert!(
        matches!(error, Error::Guard(GuardError::Dropped)),
        "{error}"
    );
    assert_eq!(
        layer.slot("input").quant_scale,
        1.,
        "no update without the other rank"
    );
}

/// An error that no layer has seen, as in a loss or a backward pass over ranks.
fn leave_early(autocast: Autocast, layer: Option<&Layer>) {
    let fails = || -> Result<(), &'static str> {
        let _guard = open(autocast);
        if let Some(layer) = layer {
            layer.linear.forward(&of(&[2., 0.], &[1, 2])).unwrap();
        }
        Err("the batch is damaged")
    };
    fails().unwrap_err();
}

/// The run continues from the state, not from the step that was lost.
#[test]
fn a_loaded_state_makes_up_for_a_dropped_guard() {
    let layer = Layer::prepared("fc", 210, 2, 2);
    let autocast = || Autocast::new(delayed(2)).reduction_group(TwoRanks::new(&[8.]));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state.safetensors");
    fp8::checkpoint::save_fp8_state(&path, &layer.linear).unwrap();
    leave_early(autocast(), Some(&layer));
    fp8::checkpoint::load_fp8_state(&path, &layer.linear).unwrap();
    open(autocast()).abort();
}

#[test]
fn a_dropped_guard_waits_for_no_other_rank() {
    let layer = Layer::prepared("fc", 210, 2, 2);
    let group = TwoRanks::new(&[8.]);
    let autocast = || Autocast::new(delayed(2)).reduction_group(group.clone());
    let next = |case: &str| {
        assert_eq!(group.calls(), Vec::<Vec<f32>>::new(), "{case}");
        // One rank alone may evaluate, before and after.
        open(autocast().training(false)).close().unwrap();
        let error = fp8_autocast(autocast()).unwrap_err();
        assert!(matches!(error, Error::Guard(GuardError::Dropped)), "{case}");
        assert_text(case, error, &["was dropped", "close()", "with_fp8"]);
        // It is said once.
        open(autocast()).abort();
    };
    let before = slots(&layer.linear);
    leave_early(autocast(), Some(&layer));
    next("a first step");
    leave_early(autocast().calibrating(true), Some(&layer));
    next("a calibration");
    assert_eq!(slots(&layer.linear), before, "no trace");

    train(
        &layer,
        autocast(),
        &of(&[4., 0.], &[1, 2]),
        &of(&[1., 1.], &[1, 2]),
    );
    end_step().unwrap();
    assert_eq!(group.calls().len(), 2, "a step that counts");
    let before = slots(&layer.linear);
    assert_eq!(before[0].history, [8., 0.]);
    leave_early(autocast(), Some(&layer));
    next("a later step");
    // The others may have used the model in it.
    leave_early(autocast(), None);
    next("a later step without a layer");
    let guard = open(autocast());
    layer.linear.forward(&of(&[2., 0.], &[1, 2])).unwrap();
    layer.linear.forward(&of(&[2.], &[1, 1])).unwrap_err();
    drop(guard);
    next("a failed layer");
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let _guard = open(autocast());
        layer.linear.forward(&of(&[2., 0.], &[1, 2])).unwrap();
        panic!("this rank alone");
    }));
    let panic = outcome.unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"this rank alone"));
    next("a panic that was caught");
    end_step().unwrap();
    assert_eq!(slots(&layer.linear), before, "no trace");
}

/// Nobody waits: a dropped guard counts, as without a group.
#[test]
fn a_dropped_guard_counts_where_nothing_is_reduced_over_ranks() {
    let recipes: [(&str, Recipe, Arc<dyn ReductionGroup>); 3] = [
        ("one rank", delayed(2).into(), Arc::new(SingleProcess)),
        (
            "reduce_amax off",
            delayed(2).with_reduce_amax(false).into(),
            TwoRanks::new(&[8.]),
        ),
        ("tensorwise", recipe("tensorwise"), TwoRanks::new(&[8.])),
    ];
    for (case, recipe, group) in recipes {
        let layer = Layer::prepared("fc", 211, 2, 2);
        let autocast = || Autocast::new(recipe.clone()).reduction_group(group.clone());
        leave_early(autocast(), Some(&layer));
        let counts = layer.slot("input").history.first() == Some(&2.);
        assert_eq!(counts, case != "tensorwise", "{case}");
        open(autocast()).close().unwrap();
    }
}
