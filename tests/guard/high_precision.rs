//! Without an open and enabled guard a layer computes what candle-nn does.

use crate::helpers::*;
use candle_core::{DType, Module, Var};
use fp8::nn::Linear;
use fp8::{Autocast, Role};
use fp8_test_support::{Layer, assert_differ, delayed, prepare, recipes, tensor, var};

#[test]
fn without_fp8_the_layer_equals_candle_nns_to_the_bit() {
    let (n, k) = (7, 9);
    let layer = Layer::new("fc", 1, n, k);
    // Another layer over the same variables: a clone would share its state.
    let linear = Linear::new(
        layer.weight.as_tensor().clone(),
        Some(layer.bias.as_tensor().clone()),
    );
    let mut prepared = Layer {
        weight: layer.weight.clone(),
        bias: layer.bias.clone(),
        linear: linear.with_path("fc"),
    };
    prepare(&mut prepared.linear);

    let disabled = Autocast::disabled();
    let fp8 = || Autocast::new(delayed(4));
    let calibrating = fp8().calibrating(true);
    let plain_contexts: Vec<(&str, Vec<Autocast>)> = vec![
        ("no guard", vec![]),
        ("disabled", vec![disabled.clone()]),
        ("disabled inside delayed", vec![fp8(), disabled.clone()]),
        (
            "disabled inside rowwise",
            vec![recipe("rowwise").into(), disabled.clone()],
        ),
        ("calibrating", vec![calibrating.clone()]),
        (
            "calibrating inside delayed",
            vec![fp8(), calibrating.clone()],
        ),
        (
            "disabled inside calibrating",
            vec![calibrating.clone(), disabled.clone()],
        ),
        (
            "calibrating without enabled",
            vec![calibrating.clone().enabled(false)],
        ),
    ];
    let all_recipes = recipes();
    let fp8_contexts: Vec<_> = all_recipes
        .iter()
        .map(|(name, r)| (*name, vec![Autocast::new(r.clone())]))
        .collect();

    for dtype in [DType::F32, DType::BF16] {
        for dims in [vec![5, k], vec![2, 3, k], vec![2, 1, 3, k]] {
            let x = Var::from_tensor(&tensor(3, &dims).to_dtype(dtype).unwrap()).unwrap();
            let mut out = dims.clone();
            *out.last_mut().unwrap() = n;
            let go = tensor(4, &out).to_dtype(dtype).unwrap();
            let stock = candle_nn::Linear::new(
                layer.weight.to_dtype(dtype).unwrap(),
                Some(layer.bias.to_dtype(dtype).unwrap()),
            );
            let expected = run(&layer, &stock, &x, &go, &[]);
            let case = |what: &str| format!("{what}, {dtype:?} {dims:?}");
            // The second round comes after calibration and training.
            for round in ["fresh", "used"] {
                for (name, guards) in &plain_contexts {
                    let got = run(&layer, &prepared.linear, &x, &go, guards);
                    assert_all_same(
                        &case(&format!("prepared ({round}), {name}")),
                        &got,
                        &expected,
                    );
                }
                for (name, guards) in plain_contexts.iter().chain(&fp8_contexts) {
                    let got = run(&layer, &layer.linear, &x, &go, guards);
                    assert_all_same(&case(&format!("not prepared, {name}")), &got, &expected);
                }
                // The comparison notices FP8.
                for (name, guards) in &fp8_contexts {
                    let got = run(&layer, &prepared.linear, &x, &go, guards);
                    assert_differ(&case(name), &got[0], &expected[0]);
                    assert_differ(&case(name), &got[1], &expected[1]);
                }
            }
        }
    }
    assert!(
        prepared
            .linear
            .fp8_state()
            .unwrap()
            .slot(Role::Input)
            .unwrap()
            .non_finite_count()
            .unwrap()
            == 0
    );
}

#[test]
fn calibration_does_not_change_later_high_precision_results() {
    let mut layer = Layer::new("fc", 10, 4, 6);
    let x = var(11, &[3, 6]);
    let go = tensor(12, &[3, 4]);
    let before = run(&layer, &layer.linear, &x, &go, &[]);
    prepare(&mut layer.linear);
    let guard = open(Autocast::new(recipe("tensorwise")).calibrating(true));
    layer.linear.forward(&x).unwrap();
    guard.close().unwrap();
    assert!(layer.linear.fp8_state().unwrap().calibration().is_some());
    for guards in [vec![], vec![Autocast::disabled()]] {
        let after = run(&layer, &layer.linear, &x, &go, &guards);
        assert_all_same(&format!("{} guards", guards.len()), &after, &before);
    }
}
