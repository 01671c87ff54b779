//! Guards dropped by a panic, and guards closed out of order.

use crate::helpers::*;
use candle_core::{Module, Tensor};
use fp8::config::InitialScale;
use fp8::{Autocast, end_step, is_fp8_enabled};
use fp8_test_support::{Layer, Slot, assert_text, delayed, of, slots, tensor};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Fails unless it ended with this panic and no other.
#[track_caller]
fn assert_panicked<T>(outcome: std::thread::Result<T>, with: &str) {
    let panic = outcome.err().expect("a panic");
    assert_eq!(panic.downcast_ref::<&str>(), Some(&with));
}

#[test]
fn a_panic_restores_what_was_there_and_updates_nothing() {
    for initial in [InitialScale::One, InitialScale::FirstBatch] {
        let recipe = || delayed(4).with_initial(initial);
        let (panicked, control) = (
            Layer::prepared("fc", 60, 3, 4),
            Layer::prepared("fc", 60, 3, 4),
        );
        let x = tensor(61, &[2, 4]);
        let go = tensor(62, &[2, 3]);
        let warm = initial == InitialScale::One;
        if warm {
            for layer in [&panicked, &control] {
                train(layer, recipe(), &(&x * 0.5).unwrap(), &go);
            }
        }
        end_step().unwrap();
        let before = slots(&panicked.linear);
        let histories = |slots: &[Slot; 3]| slots.each_ref().map(|slot| slot.history.clone());
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let _outer = open(recipe());
            let _inner = open(Autocast::disabled());
            let _innermost = open(recipe());
            let y = panicked.linear.forward(&(&x * 2.).unwrap()).unwrap();
            backward(&y, &go);
            panic!("a step that fails");
        }));
        assert_panicked(outcome, "a step that fails");
        assert!(!is_fp8_enabled(), "{initial:?}: the guards are gone");
        let after = slots(&panicked.linear);
        assert_eq!(
            histories(&after),
            histories(&before),
            "{initial:?}: histories"
        );
        if warm {
            assert_eq!(after, before, "{initial:?}: scales");
            // The next step, including its amaxes, is as if there had been no panic.
            for layer in [&panicked, &control] {
                train(layer, recipe(), &x, &go);
            }
            end_step().unwrap();
            assert_eq!(
                slots(&panicked.linear),
                slots(&control.linear),
                "{initial:?}: next step"
            );
        }
    }
}

#[test]
fn a_panic_in_the_first_step_does_not_keep_a_frozen_weight_at_scale_one() {
    let layer = Layer::prepared("fc", 63, 3, 4);
    let x = tensor(64, &[2, 4]);
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let _guard = open(delayed(4));
        layer.linear.forward(&x).unwrap();
        panic!("the first step");
    }));
    assert_panicked(outcome, "the first step");
    for _ in 0..2 {
        let _guard = open(delayed(4));
        layer.linear.forward(&x).unwrap();
    }
    let expected = 448. / amax(&layer.weight);
    assert_eq!(layer.slot("weight").quant_scale, expected, "weight");
}

#[test]
fn a_panic_drops_what_a_calibration_recorded() {
    let layer = Layer::prepared("fc", 65, 3, 4);
    let calibrate = |x: &Tensor| {
        let _guard = open(Autocast::default().calibrating(true));
        layer.linear.forward(x).unwrap();
    };
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let _guard = open(Autocast::default().calibrating(true));
        layer.linear.forward(&of(&[100.; 4], &[1, 4])).unwrap();
        panic!("while calibrating");
    }));
    assert_panicked(outcome, "while calibrating");
    assert_eq!(
        layer.linear.fp8_state().unwrap().calibration(),
        None,
        "not calibrated"
    );
    calibrate(&of(&[7.; 4], &[1, 4]));
    assert_eq!(
        layer.slot("input").quant_scale,
        64.,
        "only the batch of 7 counts"
    );
}

#[test]
fn a_panic_inside_an_inner_guard_leaves_the_outer_one_open() {
    let layer = Layer::prepared("fc", 66, 3, 4);
    let outer = open(delayed(4));
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let _inner = open(Autocast::disabled());
        panic!("inside");
    }));
    assert_panicked(outcome, "inside");
    assert!(is_fp8_enabled(), "the outer guard is back");
    let x = tensor(67, &[2, 4]);
    layer.linear.forward(&x).unwrap();
    drop(outer);
    assert_eq!(
        layer.slot("input").history[0],
        amax(&x),
        "the outer guard still updates"
    );
}

#[test]
fn guards_may_close_in_any_order() {
    let layer = Layer::prepared("fc", 70, 3, 4);
    let (x, larger) = (of(&[2.; 4], &[1, 4]), of(&[8.; 4], &[1, 4]));
    let outer = open(delayed(4));
    let middle = open(Autocast::disabled());
    let inner = open(delayed(4));
    layer.linear.forward(&x).unwrap();
    drop(middle);
    assert!(is_fp8_enabled(), "the inner guard is still open");
    layer.linear.forward(&x).unwrap();
    drop(outer);
    assert!(is_fp8_enabled(), "the inner guard outlives the outer one");
    assert_eq!(
        layer.slot("input").history,
        [2., 0., 0., 0.],
        "updated at the outer guard's close"
    );
    let error = layer.linear.forward(&larger).unwrap_err();
    assert_text("its step has ended", error, &["is closed"]);
    drop(inner);
    assert!(!is_fp8_enabled(), "all closed");
    // Nothing is left on the thread: the next guard is an outermost one again.
    {
        let _guard = open(delayed(4));
        layer.linear.forward(&larger).unwrap();
    }
    assert_eq!(
        layer.slot("input").history,
        [8., 2., 0., 0.],
        "the next step"
    );

    let disabled = open(Autocast::disabled());
    let enabled = open(recipe("tensorwise"));
    drop(disabled);
    assert!(
        is_fp8_enabled(),
        "dropping the outer, disabled guard leaves the inner one"
    );
    drop(enabled);
    assert!(!is_fp8_enabled());
}
