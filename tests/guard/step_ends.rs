//! How steps end: closed, aborted, by an error, or while something still uses them.

use crate::helpers::{amax, backward};
use candle_core::{Module, Tensor};
use fp8::rewrite::input_amaxes;
use fp8::{Autocast, AutocastHandle, Error, Recipe, Role, end_step, fp8_autocast, with_fp8};
use fp8_test_support::{Layer, assert_text, delayed, of, recipes, slots, tensor, values};

/// A layer after two training steps, with its input and its output gradient.
fn trained() -> (Layer, Tensor, Tensor) {
    let layer = Layer::prepared("fc", 1, 4, 8);
    let (x, go) = (tensor(2, &[5, 8]), tensor(3, &[5, 4]));
    for _ in 0..2 {
        let guard = fp8_autocast(delayed(4)).unwrap();
        let y = layer.linear.forward(&x).unwrap();
        guard.close().unwrap();
        backward(&y, &go);
    }
    end_step().unwrap();
    (layer, x, go)
}

fn louder(x: &Tensor) -> Tensor {
    (x * 100.).unwrap()
}

#[test]
fn an_aborted_step_leaves_no_trace() {
    let (layer, x, go) = trained();
    let before = slots(&layer.linear);
    let guard = fp8_autocast(delayed(4)).unwrap();
    let y = layer.linear.forward(&louder(&x)).unwrap();
    backward(&y, &louder(&go));
    guard.abort();
    // A late backward pass of the aborted step does not count either.
    backward(&y, &louder(&go));
    end_step().unwrap();
    assert_eq!(slots(&layer.linear), before);
    // The next step continues as if the aborted one had not happened.
    let (control, ..) = trained();
    for layer in [&layer, &control] {
        let guard = fp8_autocast(delayed(4)).unwrap();
        let y = layer.linear.forward(&x).unwrap();
        guard.close().unwrap();
        backward(&y, &go);
        end_step().unwrap();
    }
    assert_eq!(slots(&layer.linear), slots(&control.linear));
}

#[test]
fn a_closure_that_fails_leaves_no_trace() {
    let (layer, x, _) = trained();
    let before = slots(&layer.linear);
    // The error comes from candle, after a layer has recorded.
    let error = with_fp8(delayed(4), || -> Result<Tensor, Error> {
        layer.linear.forward(&louder(&x))?;
        Ok(x.matmul(&x)?)
    });
    assert_text("closure", error.unwrap_err(), &["matmul"]);
    end_step().unwrap();
    assert_eq!(slots(&layer.linear), before);
    // Any error type that converts from ours works.
    let error = with_fp8(delayed(4), || -> Result<(), Box<dyn std::error::Error>> {
        layer.linear.forward(&louder(&x))?;
        Err("the loss is not finite".into())
    });
    assert_text("text", error.unwrap_err(), &["the loss is not finite"]);
    assert_eq!(slots(&layer.linear), before);
    // A closure that succeeds counts.
    with_fp8(delayed(4), || {
        layer.linear.forward(&louder(&x)).map_err(Error::from)
    })
    .unwrap();
    assert_ne!(slots(&layer.linear), before);
}

#[test]
fn a_guard_dropped_because_of_an_error_leaves_no_trace() {
    let (layer, x, _) = trained();
    let before = slots(&layer.linear);
    let wrong_width = tensor(9, &[2, 7]);
    let fails = || -> candle_core::Result<()> {
        let _guard = fp8_autocast(delayed(4))?;
        layer.linear.forward(&louder(&x))?;
        layer.linear.forward(&wrong_width)?;
        Ok(())
    };
    assert_text("forward", fails().unwrap_err(), &["`fc`", "7 features"]);
    end_step().unwrap();
    assert_eq!(slots(&layer.linear), before);
    // If the error is handled and the guard closed, the step counts.
    let guard = fp8_autocast(delayed(4)).unwrap();
    layer.linear.forward(&louder(&x)).unwrap();
    let error = layer.linear.forward(&wrong_width).unwrap_err();
    assert_text("handled", error, &["`fc`", "7 features"]);
    guard.close().unwrap();
    assert_ne!(slots(&layer.linear), before);
}

/// The outermost guard is the step: one inside it only closes, however it ends.
#[test]
fn an_inner_guard_that_fails_leaves_what_it_recorded() {
    let (layer, x, _) = trained();
    let (control, ..) = trained();
    let outer = fp8_autocast(delayed(4)).unwrap();
    let inner = fp8_autocast(delayed(4)).unwrap();
    layer.linear.forward(&x).unwrap();
    inner.abort();
    let error = with_fp8(delayed(4), || -> Result<Tensor, Error> {
        layer.linear.forward(&louder(&x))?;
        Ok(x.matmul(&x)?)
    });
    assert_text("closure", error.unwrap_err(), &["matmul"]);
    outer.close().unwrap();
    let guard = fp8_autocast(delayed(4)).unwrap();
    control.linear.forward(&x).unwrap();
    control.linear.forward(&louder(&x)).unwrap();
    guard.close().unwrap();
    assert_eq!(slots(&layer.linear), slots(&control.linear));
}

#[test]
fn a_measurement_of_inputs_that_fails_sets_no_scale() {
    let layer = Layer::new("fc", 1, 4, 8);
    let x = tensor(2, &[5, 8]);
    let amax = || {
        let state = layer.linear.fp8_state().unwrap();
        state.slot(Role::Input).unwrap().calibrated_amax()
    };
    let error = input_amaxes(&layer.linear, || {
        layer.linear.forward(&x)?;
        x.matmul(&x)?;
        Ok(())
    });
    assert_text("measurement", error.unwrap_err(), &["matmul"]);
    end_step().unwrap();
    assert_eq!(amax(), None);
    let found = input_amaxes(&layer.linear, || {
        layer.linear.forward(&x)?;
        Ok(())
    });
    assert_eq!(amax(), Some(found.unwrap()["fc"]));
}

#[test]
fn inner_guards_and_handles_fail_after_their_guard_has_closed() {
    let (layer, x, _) = trained();
    let guard = fp8_autocast(delayed(4)).unwrap();
    let handle = guard.handle();
    let inner = fp8_autocast(Autocast::new(delayed(4))).unwrap();
    layer.linear.forward(&x).unwrap();
    guard.close().unwrap();
    let before = slots(&layer.linear);

    // The inner guard is still open: computing in it reports that the outer one is closed.
    let error = layer.linear.forward(&louder(&x)).unwrap_err();
    assert_text("inner guard", error, &["is closed"]);
    inner.close().unwrap();
    assert!(matches!(
        handle.open(),
        Err(Error::Guard(fp8::GuardError::Closed))
    ));
    assert!(matches!(
        handle.run(|| ()),
        Err(Error::Guard(fp8::GuardError::Closed))
    ));

    // The handle stays closed in the next step.
    let guard = fp8_autocast(delayed(4)).unwrap();
    let late = std::thread::scope(|scope| {
        let run = scope.spawn(|| handle.open().map(drop));
        run.join().unwrap()
    });
    assert!(
        matches!(late, Err(Error::Guard(fp8::GuardError::Closed))),
        "{late:?}"
    );
    guard.close().unwrap();
    assert_eq!(slots(&layer.linear), before);
}

#[test]
fn a_guard_on_another_thread_fails_after_its_owner_has_closed() {
    let (layer, x, _) = trained();
    let guard = fp8_autocast(delayed(4)).unwrap();
    let handle = guard.handle();
    let (opened, wait) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
    std::thread::scope(|scope| {
        let (layer, x) = (&layer, &x);
        let (opened, wait) = (&opened, &wait);
        let late = scope.spawn(move || {
            let _inner = handle.open().unwrap();
            opened.wait();
            wait.wait();
            layer.linear.forward(x).map(|_| ())
        });
        opened.wait();
        guard.close().unwrap();
        wait.wait();
        let error = late.join().unwrap().unwrap_err();
        assert_text("late use", error, &["is closed"]);
    });
}

#[test]
fn end_step_in_an_inner_guard_ends_the_step_of_the_outer_one() {
    let (layer, x, go) = trained();
    let outer = fp8_autocast(delayed(4)).unwrap();
    {
        let _disabled = fp8_autocast(Autocast::disabled()).unwrap();
        let _inner = fp8_autocast(delayed(4)).unwrap();
        let y = layer.linear.forward(&louder(&x)).unwrap();
        backward(&y, &go);
        assert_eq!(end_step().unwrap().layers(), 1);
    }
    let after = slots(&layer.linear);
    assert_eq!(after[0].history[0], amax(&louder(&x)));
    outer.close().unwrap();
    assert_eq!(
        slots(&layer.linear),
        after,
        "the close has nothing left to update"
    );
}

#[test]
fn the_summary_says_what_was_cast() {
    for (name, recipe) in recipes() {
        let layer = Layer::prepared("fc", 1, 4, 8);
        let x = tensor(2, &[5, 8]);
        let guard = fp8_autocast(recipe).unwrap();
        layer.linear.forward(&x).unwrap();
        let summary = guard.close().unwrap();
        assert_eq!((summary.casts(), summary.layers()), (2, 1), "{name}");
        assert_eq!(summary.non_finite().unwrap(), [], "{name}");
    }
}

/// Inf and NaN are reported under every recipe, with the tensor that held them.
#[test]
fn inf_and_nan_are_reported_under_every_recipe() {
    for (name, recipe) in recipes() {
        for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let layer = Layer::prepared("fc", 1, 4, 8);
            let mut x = values(2, 40);
            x[17] = bad;
            let x = candle_core::Var::from_tensor(&of(&x, &[5, 8])).unwrap();
            let guard = fp8_autocast(recipe.clone()).unwrap();
            let y = layer.linear.forward(&x).unwrap();
            let forward = guard.close().unwrap().non_finite().unwrap();
            let slots: Vec<&str> = forward.iter().map(|found| found.slot.as_str()).collect();
            assert_eq!(slots, ["fc.input"], "{name} {bad}");
            // Those of gradients are reported at the end of the step, those of the forward pass not again.
            let mut go = values(3, 20);
            go[3] = bad;
            backward(&y, &of(&go, &[5, 4]));
            let backward = end_step().unwrap().non_finite().unwrap();
            let slots: Vec<&str> = backward.iter().map(|found| found.slot.as_str()).collect();
            assert!(slots.contains(&"fc.grad_output"), "{name} {bad}: {slots:?}");
        }
    }
}

#[test]
fn evaluation_reports_inf_and_nan() {
    let layer = Layer::prepared("fc", 1, 4, 8);
    let recipe: Recipe = "tensorwise".parse().unwrap();
    let guard = fp8_autocast(Autocast::new(recipe).training(false)).unwrap();
    layer.linear.forward(&of(&[f32::NAN; 8], &[1, 8])).unwrap();
    let summary = guard.close().unwrap();
    assert_eq!(summary.casts(), 2);
    assert_eq!(summary.non_finite().unwrap()[0].slot, "fc.input");
    assert_eq!(
        layer.slot("input").non_finite,
        0,
        "evaluation changes nothing"
    );
}

#[test]
fn a_handle_without_a_guard_opens_high_precision() {
    let handle = AutocastHandle::current();
    let guard = fp8_autocast(delayed(4)).unwrap();
    let inner = handle.open().unwrap();
    assert!(!fp8::is_fp8_enabled());
    inner.close().unwrap();
    guard.close().unwrap();
}
