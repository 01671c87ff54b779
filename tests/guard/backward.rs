//! A backward pass uses what its forward pass captured.

use crate::helpers::*;
use candle_core::{Module, Var};
use fp8::config::Fp8LinearConfig;
use fp8::{Autocast, end_step};
use fp8_test_support::{
    Layer, assert_close, assert_differ, assert_same, bits, recipes, skipped_on_cuda, slots, tensor,
    var,
};

#[test]
fn backward_uses_what_forward_captured_whatever_guard_is_open() {
    if skipped_on_cuda("the threads share what lives on the device of one of them") {
        return;
    }
    for (name, recipe) in recipes() {
        let x = var(211, &[5, 8]);
        let go = tensor(212, &[5, 4]);
        let gradients = |place: &str| {
            let layer = Layer::prepared("fc", 210, 4, 8);
            for _ in 0..2 {
                train(&layer, recipe.clone(), &x, &go);
            }
            let guard = open(recipe.clone());
            let y = layer.linear.forward(&x).unwrap();
            let grads = match place {
                "inside" => {
                    let grads = backward(&y, &go);
                    drop(guard);
                    grads
                }
                "after the close" => {
                    drop(guard);
                    backward(&y, &go)
                }
                "inside a disabled guard" => {
                    drop(guard);
                    let _guard = open(Autocast::disabled());
                    backward(&y, &go)
                }
                "inside an evaluation guard" => {
                    drop(guard);
                    let _guard = open(Autocast::new(recipe.clone()).training(false));
                    backward(&y, &go)
                }
                "inside another recipe, nested" => {
                    let inner = open(Fp8LinearConfig::default().with_emulate(true));
                    let grads = backward(&y, &go);
                    drop((inner, guard));
                    grads
                }
                "on another thread" => {
                    drop(guard);
                    in_private_pool(|| backward(&y, &go))
                }
                _ => unreachable!("{place}"),
            };
            let grad = |var: &Var| grads.get(var).unwrap().clone();
            let grads = [grad(&x), grad(&layer.weight), grad(&layer.bias)];
            end_step().unwrap();
            (grads, slots(&layer.linear))
        };
        let (expected, state) = gradients("inside");
        for place in [
            "after the close",
            "inside a disabled guard",
            "inside an evaluation guard",
            "inside another recipe, nested",
            "on another thread",
        ] {
            let (got, got_state) = gradients(place);
            for (what, (got, expected)) in TENSORS[1..].iter().zip(got.iter().zip(&expected)) {
                assert_same(&format!("{name}, backward {place}, {what}"), got, expected);
            }
            assert_eq!(got_state, state, "{name}, backward {place}: state");
        }
        // These are the gradients of FP8, not those of the plain layer.
        let layer = Layer::new("fc", 210, 4, 8);
        let plain = run(&layer, &layer.stock(), &x, &go, &[]);
        assert_differ(&format!("{name}, grad_x"), &expected[0], &plain[1]);
        let high_precision = name == "rowwise_with_gw_hp";
        let same = bits(&expected[1]) == bits(&plain[2]);
        assert_eq!(
            same, high_precision,
            "{name}: grad_weight as the plain layer's"
        );
        assert_close(&format!("{name}, grad_x"), &expected[0], &plain[1], 0.2);
        assert_close(
            &format!("{name}, grad_weight"),
            &expected[1],
            &plain[2],
            0.2,
        );
    }
}

/// The recipe of a later step has no effect on a graph that was made before it.
#[test]
fn backward_of_an_older_step_keeps_its_operands() {
    let layer = Layer::prepared("fc", 220, 4, 8);
    let x = var(221, &[5, 8]);
    let go = tensor(222, &[5, 4]);
    let forward = || {
        let _guard = open(recipe("tensorwise"));
        layer.linear.forward(&x).unwrap()
    };
    let grads = backward(&forward(), &go);
    let expected = grads.get(&x).unwrap().clone();
    let y = forward();
    for name in ["rowwise", "delayed"] {
        let _guard = open(recipe(name));
        layer
            .linear
            .forward(&(x.as_tensor() * 50.).unwrap())
            .unwrap();
    }
    let grads = backward(&y, &go);
    assert_same("grad_x", grads.get(&x).unwrap(), &expected);
}
