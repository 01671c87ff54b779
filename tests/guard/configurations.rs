//! Recipes other than plain delayed scaling, and guards that meet odd input.

use crate::helpers::*;
use candle_core::{DType, Module, Tensor};
use fp8::config::{CastConfig, Fp8LinearConfig, Recipe};
use fp8::fp8_core::{AmaxCompute, Format, Granularity};
use fp8::{Autocast, end_step, fp8_autocast, is_fp8_enabled};
use fp8_test_support::{Layer, assert_close, assert_text, delayed, device, of, slots, tensor};

#[test]
fn delayed_casts_of_a_custom_configuration_are_updated() {
    let delayed_cast = CastConfig::delayed_tensorwise;
    let dynamic = CastConfig::dynamic_tensorwise();
    let cases: [(&str, Fp8LinearConfig, [bool; 3]); 4] = [
        (
            "input only",
            Fp8LinearConfig::default().with_input(delayed_cast()),
            [true, false, false],
        ),
        (
            "weight and gradient",
            Fp8LinearConfig::default()
                .with_weight(delayed_cast())
                .with_grad_output(delayed_cast().with_format(Format::E4M3)),
            [false, true, true],
        ),
        (
            "input, only for the weight's gradient",
            Fp8LinearConfig::default().with_input_for_grad_weight(Some(delayed_cast())),
            [true, false, false],
        ),
        (
            "none",
            Fp8LinearConfig::default().with_input(dynamic),
            [false, false, false],
        ),
    ];
    for (case, config, updated) in cases {
        let layer = Layer::prepared("fc", 230, 2, 2);
        let (x, go) = (of(&[2., 1.], &[1, 2]), of(&[8., 1.], &[1, 2]));
        // Two steps, because the cast of a backward pass is updated one step later.
        for _ in 0..2 {
            train(&layer, config.clone(), &x, &go);
        }
        end_step().unwrap();
        let slots = slots(&layer.linear);
        let got = slots.each_ref().map(|slot| slot.quant_scale != 1.);
        assert_eq!(got, updated, "{case}: input, weight, grad_output");
        let max = if case == "weight and gradient" {
            448.
        } else {
            57344.
        };
        let scales = [448. / 2., 448. / amax(&layer.weight), max / 8.];
        for ((slot, scale), updated) in slots.iter().zip(scales).zip(updated) {
            if updated {
                assert_eq!(slot.quant_scale, scale, "{case}");
                assert_eq!(slot.history.len(), 1024, "{case}: the default history");
            }
        }
    }
    // The configuration asks for power-of-two scales; its delayed casts have them too.
    let layer = Layer::prepared("fc", 230, 2, 2);
    let config = Fp8LinearConfig::default()
        .with_input(delayed_cast())
        .with_round_scales_to_power_of_two(true);
    train(
        &layer,
        config,
        &of(&[2., 1.], &[1, 2]),
        &of(&[8., 1.], &[1, 2]),
    );
    assert_eq!(
        layer.slot("input").quant_scale,
        128.,
        "448 / 2 floored to a power of two"
    );
}

#[test]
fn a_static_recipe_needs_a_calibration_and_uses_its_scales() {
    let static_cast = CastConfig::static_tensorwise();
    let config = Fp8LinearConfig::default()
        .with_input(static_cast)
        .with_weight(static_cast);
    let layer = Layer::prepared("blocks.0.fc", 240, 2, 2);
    let x = of(&[2., 1.], &[1, 2]);
    let forward = || {
        let _guard = open(Autocast::new(config.clone()).training(false));
        layer.linear.forward(&x)
    };
    assert_text(
        "not calibrated",
        forward().unwrap_err(),
        &["blocks.0.fc.input", "calibrate"],
    );
    for value in [3.5, 7.] {
        let _guard = open(Autocast::new(config.clone()).calibrating(true));
        layer.linear.forward(&of(&[value, 0.], &[1, 2])).unwrap();
    }
    assert_eq!(
        layer.slot("input").quant_scale,
        64.,
        "the largest of all batches"
    );
    let plain = layer.stock().forward(&x).unwrap();
    assert_close("static", &forward().unwrap(), &plain, 0.1);
}

#[test]
fn an_inconsistent_recipe_opens_no_guard() {
    let rowwise_delayed = CastConfig::delayed_tensorwise().with_granularity(Granularity::Rowwise);
    for (recipe, parts) in [
        (Recipe::from(delayed(0)), ["amax_history_len", "0"]),
        (
            Fp8LinearConfig::default()
                .with_input(CastConfig::disabled())
                .into(),
            ["output", "input"],
        ),
        (
            Fp8LinearConfig::default()
                .with_weight(rowwise_delayed)
                .into(),
            ["weight", "rowwise"],
        ),
    ] {
        let error = fp8_autocast(recipe.clone()).unwrap_err();
        assert_text(&format!("{recipe:?}"), error, &parts);
        assert!(!is_fp8_enabled(), "{recipe:?}");
    }
    let _outer = open(recipe("tensorwise"));
    let error = fp8_autocast(delayed(0)).unwrap_err();
    assert_text("inner", error, &["amax_history_len = 0"]);
    assert!(is_fp8_enabled(), "the outer guard is as it was");
}

#[test]
fn an_input_of_the_wrong_width_or_kind_names_the_layer() {
    let layer = Layer::prepared("blocks.3.fc", 250, 4, 8);
    for guards in [
        vec![],
        vec![Autocast::default()],
        vec![Autocast::disabled()],
    ] {
        let _nest = Nest::open(&guards);
        let error = layer.linear.forward(&tensor(1, &[3, 7])).unwrap_err();
        assert_text(
            "width",
            error,
            &["blocks.3.fc", "[3, 7]", "7 features", "expected 8"],
        );
        let integers = Tensor::zeros((3, 8), DType::U32, &device()).unwrap();
        let error = layer.linear.forward(&integers).unwrap_err();
        assert_text("dtype", error, &["blocks.3.fc", "u32"]);
    }
}

#[test]
fn a_step_on_a_new_thread_counts_the_gradients_of_the_previous_step() {
    let (x, go) = (tensor(1, &[4, 8]), tensor(2, &[4, 6]));
    let layer = Layer::prepared("l", 3, 6, 8);
    let control = Layer::prepared("l", 3, 6, 8);
    for _ in 0..3 {
        std::thread::scope(|scope| {
            scope.spawn(|| train(&layer, delayed(4), &x, &go));
        });
        train(&control, delayed(4), &x, &go);
    }
    end_step().unwrap();
    // The gradients of the last backward pass are only counted when a next step begins.
    std::thread::scope(|scope| {
        scope.spawn(|| train(&layer, delayed(4), &x, &go));
    });
    assert_eq!(layer.slot("grad_output"), control.slot("grad_output"));
    assert_ne!(layer.slot("grad_output").quant_scale, 1.);
}

#[test]
fn a_training_guard_inside_an_evaluation_guard_begins_a_step() {
    let (x, go) = (tensor(1, &[4, 8]), tensor(2, &[4, 6]));
    let layer = Layer::prepared("l", 3, 6, 8);
    train(&layer, delayed(4), &x, &go);
    assert_eq!(layer.slot("grad_output").quant_scale, 1.);
    let _evaluation = open(Autocast::new(delayed(4)).training(false));
    assert_eq!(layer.slot("grad_output").quant_scale, 1.);
    let _training = open(delayed(4));
    layer.linear.forward(&x).unwrap();
    assert_eq!(
        layer.slot("grad_output").quant_scale,
        57344. / amax(&go),
        "settled when the step uses the model"
    );
}

#[test]
fn calibrating_again_keeps_the_inputs_seen_but_not_the_old_weight() {
    let calibrated = |recipe: Recipe| {
        let layer = Layer::prepared("l", 3, 6, 8);
        let calibrate = |x: &Tensor| {
            let _guard = open(Autocast::new(recipe.clone()).calibrating(true));
            layer.linear.forward(x).unwrap();
        };
        layer.weight.set(&of(&[1.; 48], &[6, 8])).unwrap();
        calibrate(&of(&[8.; 8], &[1, 8]));
        layer.weight.set(&of(&[0.5; 48], &[6, 8])).unwrap();
        calibrate(&of(&[2.; 8], &[1, 8]));
        ["input", "weight"].map(|role| layer.slot(role).quant_scale)
    };
    // Calibration makes dequant_scale = amax / MAX; quant_scale is its reciprocal.
    let [input, weight] = calibrated("tensorwise".parse().unwrap());
    assert_eq!((input, weight), (1. / (8. / 448.), 1. / (0.5 / 448.)));
    // Delayed scaling has a history, of weights too.
    let as_stored = |quant_scale: f32| 1. / (1. / quant_scale);
    let expected = [448. / 8., 448. / 1.].map(as_stored);
    assert_eq!(calibrated(delayed(4).into()), expected);
    let newest = delayed(4).with_amax_compute(AmaxCompute::MostRecent);
    let expected = [448. / 2., 448. / 0.5].map(as_stored);
    assert_eq!(calibrated(newest.into()), expected);
}

#[test]
fn an_inner_recipe_without_delayed_casts_does_not_stop_the_update_of_the_outer_one() {
    let (x, go) = (tensor(1, &[4, 8]), tensor(2, &[4, 6]));
    let layer = Layer::prepared("l", 3, 6, 8);
    let guard = open(delayed(4));
    let y = layer.linear.forward(&x).unwrap();
    {
        let _inner = open(recipe("tensorwise"));
        layer.linear.forward(&x).unwrap();
    }
    guard.close().unwrap();
    backward(&y, &go);
    end_step().unwrap();
    assert_eq!(layer.slot("input").quant_scale, 448. / amax(&x));
    assert_eq!(layer.slot("grad_output").quant_scale, 57344. / amax(&go));
}
