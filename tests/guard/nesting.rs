//! Guards inside guards: the innermost one decides.

use crate::helpers::*;
use candle_core::Module;
use fp8::{Autocast, is_fp8_enabled};
use fp8_test_support::{Layer, assert_differ, assert_same, delayed, of, slots, tensor};

#[test]
fn an_inner_guard_overrides_the_outer_one_fully() {
    let layer = Layer::prepared("fc", 20, 8, 16);
    let x = tensor(21, &[5, 16]);
    let alone = |name: &str| {
        let _guard = open(recipe(name));
        layer.linear.forward(&x).unwrap()
    };
    let names = ["tensorwise", "rowwise"];
    let [tensorwise, rowwise] = names.map(alone);
    assert_differ("the recipes", &tensorwise, &rowwise);

    let outer = open(recipe("tensorwise"));
    {
        let _inner = open(recipe("rowwise"));
        assert_same(
            "inner rowwise",
            &layer.linear.forward(&x).unwrap(),
            &rowwise,
        );
        {
            let _disabled = open(Autocast::disabled());
            assert!(!is_fp8_enabled(), "disabled innermost");
            let plain = layer.stock().forward(&x).unwrap();
            assert_same(
                "disabled innermost",
                &layer.linear.forward(&x).unwrap(),
                &plain,
            );
        }
        assert!(is_fp8_enabled(), "after the disabled guard");
        assert_same(
            "rowwise again",
            &layer.linear.forward(&x).unwrap(),
            &rowwise,
        );
    }
    assert_same(
        "outer again",
        &layer.linear.forward(&x).unwrap(),
        &tensorwise,
    );
    drop(outer);
    assert!(!is_fp8_enabled(), "after the last guard");
}

/// The `training` flag of the innermost guard counts.
#[test]
fn the_training_flag_of_the_innermost_guard_decides_what_is_recorded() {
    let x = tensor(31, &[2, 4]);
    for (outer, inner, records) in [
        (true, false, false),
        (false, true, true),
        (true, true, true),
        (false, false, false),
    ] {
        let layer = Layer::prepared("fc", 30, 3, 4);
        {
            let _outer = open(Autocast::new(delayed(4)).training(outer));
            let _inner = open(Autocast::new(delayed(4)).training(inner));
            layer.linear.forward(&x).unwrap();
        }
        let recorded = layer.slot("input").history[0] > 0.;
        assert_eq!(
            recorded, records,
            "outer training {outer}, inner training {inner}"
        );
    }
}

#[test]
fn scales_change_only_when_the_outermost_enabled_guard_closes() {
    let x = tensor(41, &[2, 4]);
    let fp8 = || Autocast::new(delayed(4));
    let off = Autocast::disabled;
    // The guards from the outermost to the innermost, and the index of the one whose close updates the scales.
    let cases: [(&str, Vec<Autocast>, usize); 6] = [
        ("one guard", vec![fp8()], 0),
        ("two enabled", vec![fp8(), fp8()], 0),
        ("three enabled", vec![fp8(), fp8(), fp8()], 0),
        ("enabled inside disabled", vec![off(), fp8()], 1),
        ("enabled, disabled, enabled", vec![fp8(), off(), fp8()], 0),
        ("disabled, enabled, enabled", vec![off(), fp8(), fp8()], 1),
    ];
    for (case, guards, at) in cases {
        let layer = Layer::prepared("fc", 40, 3, 4);
        let mut nest: Vec<_> = guards.into_iter().map(open).collect();
        layer.linear.forward(&x).unwrap();
        while let Some(guard) = nest.pop() {
            let [input, weight, _] = slots(&layer.linear);
            let untouched = input.quant_scale == 1. && weight.quant_scale == 1.;
            assert!(
                untouched || nest.len() < at,
                "{case}: updated before guard {at} closed"
            );
            guard.close().unwrap();
            if nest.len() == at {
                let [input, weight, _] = slots(&layer.linear);
                assert_eq!(input.history[0], amax(&x), "{case}: input");
                assert_eq!(weight.history[0], amax(&layer.weight), "{case}: weight");
            }
        }
        assert_eq!(layer.slot("input").history[1], 0., "{case}: updated twice");
    }
}

#[test]
fn layers_are_updated_by_the_recipe_of_their_inner_guard() {
    let (a, b) = (
        Layer::prepared("a", 50, 2, 2),
        Layer::prepared("b", 51, 2, 2),
    );
    let x = of(&[2., 0.], &[1, 2]);
    {
        let _outer = open(delayed(4));
        a.linear.forward(&x).unwrap();
        let _inner = open(delayed(2).with_margin(1));
        b.linear.forward(&x).unwrap();
    }
    let (a, b) = (a.slot("input"), b.slot("input"));
    assert_eq!(
        (a.quant_scale, a.history),
        (224., vec![2., 0., 0., 0.]),
        "outer recipe"
    );
    assert_eq!(
        (b.quant_scale, b.history),
        (112., vec![2., 0.]),
        "inner recipe"
    );
}
