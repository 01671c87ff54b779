//! Delayed scaling: when scales are updated, and what evaluation leaves alone.

use crate::helpers::*;
use candle_core::{Module, Tensor};
use fp8::{Autocast, end_step};
use fp8_test_support::{
    Layer, Slot, assert_close, assert_differ, assert_same, bits, delayed, flat, of,
    skipped_on_cuda, slots, tensor,
};

#[test]
fn forward_scales_update_at_close_and_gradient_scales_at_the_next_use_or_end_of_step() {
    let x = of(&[2., -1.], &[1, 2]);
    let go = of(&[8., 4.], &[1, 2]);
    type Ending = (&'static str, fn(&Layer), bool);
    // Opens a guard, uses the layer in it and aborts. Only training of this layer ends the wait for its gradients.
    fn used_in(layer: &Layer, autocast: impl Into<Autocast>) {
        let guard = open(autocast);
        layer.linear.forward(&of(&[0.; 2], &[1, 2])).unwrap();
        guard.abort();
    }
    let endings: [Ending; 6] = [
        ("end_step", |_| drop(end_step().unwrap()), true),
        (
            "use in the next guard",
            |layer| used_in(layer, delayed(4)),
            true,
        ),
        (
            "use in the next guard of another recipe",
            |layer| used_in(layer, recipe("rowwise")),
            true,
        ),
        (
            "a guard of another model",
            |_| used_in(&Layer::prepared("other", 9, 2, 2), delayed(4)),
            false,
        ),
        (
            "use in an evaluation guard",
            |layer| used_in(layer, Autocast::new(delayed(4)).training(false)),
            false,
        ),
        (
            "use in a disabled guard",
            |layer| used_in(layer, Autocast::disabled()),
            false,
        ),
    ];
    for (case, ending, updates) in endings {
        let layer = Layer::prepared("fc", 100, 2, 2);
        let guard = open(delayed(4));
        let y = layer.linear.forward(&x).unwrap();
        backward(&y, &go);
        assert_eq!(
            layer.slot("input").history[0],
            0.,
            "{case}: nothing while the guard is open"
        );
        guard.close().unwrap();
        let [input, weight, grad_output] = slots(&layer.linear);
        assert_eq!(input.quant_scale, 224., "{case}: input at close");
        assert_eq!(
            weight.quant_scale,
            448. / amax(&layer.weight),
            "{case}: weight at close"
        );
        assert_eq!(grad_output.quant_scale, 1., "{case}: grad_output waits");
        ending(&layer);
        let expected = if updates { 7168. } else { 1. };
        assert_eq!(
            layer.slot("grad_output").quant_scale,
            expected,
            "grad_output after {case}"
        );
        end_step().unwrap();
        let grad_output = layer.slot("grad_output");
        assert_eq!(grad_output.history, [8., 0., 0., 0.], "{case}: once in all");
        end_step().unwrap();
        assert_eq!(
            layer.slot("grad_output"),
            grad_output,
            "{case}: a second end_step"
        );
        assert_eq!(
            layer.slot("input").history,
            [2., 0., 0., 0.],
            "{case}: input stays"
        );
    }
}

#[test]
fn gradients_of_a_backward_after_the_close_count_too() {
    let layer = Layer::prepared("fc", 105, 2, 2);
    let x = of(&[2., -1.], &[1, 2]);
    for (step, amax) in [8f32, 32., 2.].into_iter().enumerate() {
        train(&layer, delayed(4), &x, &of(&[amax, 0.], &[1, 2]));
        let recorded = layer.slot("grad_output").history;
        assert_eq!(
            recorded[0],
            [0., 8., 32.][step],
            "step {step}: the last step's amax"
        );
    }
    end_step().unwrap();
    let expected = Slot {
        quant_scale: 1792.,
        history: vec![2., 32., 8., 0.],
        non_finite: 0,
    };
    assert_eq!(layer.slot("grad_output"), expected);
}

#[test]
fn evaluation_casts_with_the_frozen_scales_and_changes_nothing() {
    let layer = Layer::prepared("fc", 110, 4, 8);
    let (x, go) = (tensor(111, &[3, 8]), tensor(112, &[3, 4]));
    for _ in 0..2 {
        train(&layer, delayed(4), &x, &go);
    }
    end_step().unwrap();
    let before = slots(&layer.linear);
    let eval = |x: &Tensor| {
        let guard = open(Autocast::new(delayed(4)).training(false));
        let y = layer.linear.forward(x).unwrap();
        guard.close().unwrap();
        y
    };
    let big = (&x * 100.).unwrap();
    let y = eval(&x);
    assert_differ("evaluation is FP8", &y, &layer.stock().forward(&x).unwrap());
    // With the frozen scale, an input a hundred times larger saturates.
    let largest = 448. / before[0].quant_scale;
    let clamped = layer
        .stock()
        .forward(&big.clamp(-largest, largest).unwrap())
        .unwrap();
    assert_close("saturated", &eval(&big), &clamped, 0.1);
    backward(&eval(&x), &go);
    end_step().unwrap();
    assert_eq!(slots(&layer.linear), before, "no scale and no history");
    assert_same("evaluation again", &eval(&x), &y);
}

#[test]
fn evaluation_between_the_steps_leaves_no_trace() {
    let x = tensor(116, &[3, 8]);
    let go = tensor(117, &[3, 4]);
    let steps = |evaluate: bool| {
        let layer = Layer::prepared("fc", 115, 4, 8);
        let mut ys = vec![];
        for step in 0..4 {
            let x = (&x * f64::from(1 + step)).unwrap();
            ys.push(bits(&train(&layer, delayed(2), &x, &go)));
            if evaluate {
                let _guard = open(Autocast::new(delayed(2)).training(false));
                layer.linear.forward(&(&x * 3.).unwrap()).unwrap();
            }
            // The weight changes in every second step only.
            if step % 2 == 1 {
                layer
                    .weight
                    .set(&(layer.weight.as_tensor() * 0.9).unwrap())
                    .unwrap();
            }
        }
        end_step().unwrap();
        (ys, slots(&layer.linear))
    };
    let (without, with) = (steps(false), steps(true));
    assert_eq!(with.1, without.1, "state");
    assert!(with.0 == without.0, "outputs of the training steps");
}

/// The weight 0.3 is cast to 256 / 896 with the scale of the weight 0.5 before it, and to 448 with its own scale.
#[test]
fn evaluation_takes_the_newest_scale_and_leaves_the_codes_of_the_step() {
    if skipped_on_cuda("a GPU casts the weight in each forward pass: its change is not known there")
    {
        return;
    }
    let layer = Layer::prepared("fc", 118, 1, 1);
    let one = of(&[1.], &[1, 1]);
    layer.bias.set(&of(&[0.], &[1])).unwrap();
    layer.weight.set(&of(&[0.5], &[1, 1])).unwrap();
    train(&layer, delayed(1), &one, &one);
    layer.weight.set(&of(&[0.3], &[1, 1])).unwrap();
    let evaluate = || {
        let _guard = open(Autocast::new(delayed(1)).training(false));
        layer.linear.forward(&one).unwrap()
    };
    for (case, y, expected) in [
        ("evaluation before the step", evaluate(), 256. / 896.),
        (
            "training",
            train(&layer, delayed(1), &one, &one),
            256. / 896.,
        ),
        ("evaluation", evaluate(), 0.3),
        (
            "training, unchanged weight",
            train(&layer, delayed(1), &one, &one),
            256. / 896.,
        ),
        ("evaluation again", evaluate(), 0.3),
    ] {
        let y = flat(&y)[0];
        assert!(
            f64::from((y - expected).abs()) <= SCALED * f64::from(expected),
            "{case}: got {y}, expected {expected}"
        );
    }
}

#[test]
fn a_disabled_guard_updates_nothing() {
    let layer = Layer::prepared("fc", 120, 4, 8);
    let (x, go) = (tensor(121, &[3, 8]), tensor(122, &[3, 4]));
    train(&layer, delayed(4), &x, &go);
    end_step().unwrap();
    let before = slots(&layer.linear);
    for guards in [
        vec![Autocast::disabled()],
        vec![delayed(4).into(), Autocast::disabled()],
    ] {
        let nest = Nest::open(&guards);
        backward(&layer.linear.forward(&(&x * 2.).unwrap()).unwrap(), &go);
        drop(nest);
        end_step().unwrap();
        assert_eq!(slots(&layer.linear), before, "{} guards", guards.len());
    }
}
