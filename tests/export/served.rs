//! What the loaded model computes.

use crate::net::*;
use candle_core::{DType, Module};
use fp8::config::{Fp8LinearConfig, Recipe, RecipeName};
use fp8::fp8_core::Granularity;
use fp8::load::{Checkpoint, var_builder};
use fp8::nn::InputScaling;
use fp8::{
    Autocast, ExportOptions, ExportReport, fp8_autocast, save_calibrated, save_calibrated_with,
};
use fp8_test_support::rounding::two_products;
use fp8_test_support::{
    assert_close, assert_differ, assert_same, assert_served, assert_text, delayed, device, recipes,
    skipped_on_cuda, tensor, var,
};
use safetensors::Dtype;
use std::collections::BTreeMap;

#[test]
fn the_loaded_model_computes_what_the_calibrated_one_does() {
    let (_vars, net) = calibrated(delayed(16));
    let dir = dir();
    let report = save_calibrated(&net, dir.path()).unwrap();
    let ours = Net::new(var_builder(&[&report.model], DType::F32, &device()).unwrap()).unwrap();
    let candles = Net::new(candle_var_builder(&report.model, DType::F32)).unwrap();
    for seed in 0..4 {
        let ids = ids(seed);
        let expected = eval(&net, delayed(16), &ids);
        assert_differ(
            "FP8 is not the plain model",
            &expected,
            &net.forward(&ids).unwrap(),
        );
        assert_close("but near it", &expected, &net.forward(&ids).unwrap(), 0.1);
        for (name, loaded) in [("our VarBuilder", &ours), ("candle's VarBuilder", &candles)] {
            let case = format!("{name}, batch {seed}");
            assert_same(&case, &loaded.forward(&ids).unwrap(), &expected);
            // A weight loaded in FP8 computes in FP8 whatever the recipe of the guard.
            for (recipe_name, recipe) in recipes() {
                assert_same(
                    &format!("{case}, {recipe_name}"),
                    &eval(loaded, recipe, &ids),
                    &expected,
                );
            }
        }
    }
}

#[test]
fn a_disabled_guard_multiplies_by_the_dequantized_weight() {
    let (_vars, net) = calibrated(delayed(16));
    let dir = dir();
    let report = save_calibrated(&net, dir.path()).unwrap();
    let loaded = Net::new(var_builder(&[&report.model], DType::F32, &device()).unwrap()).unwrap();
    let x = tensor(1, &[3, WIDTH]);
    let layer = &loaded.blocks[0].fc1;
    let weight = layer
        .static_weight()
        .unwrap()
        .codes()
        .dequantize(DType::F32)
        .unwrap();
    let plain = candle_nn::Linear::new(weight, layer.bias().cloned())
        .forward(&x)
        .unwrap();
    let fp8 = layer.forward(&x).unwrap();
    let _guard = fp8_autocast(Autocast::disabled()).unwrap();
    assert_same("disabled", &layer.forward(&x).unwrap(), &plain);
    assert_differ("without a guard", &fp8, &plain);
}

#[test]
fn a_static_recipe_and_a_dynamic_one_export_static_scales_too() {
    let static_cast = fp8::config::CastConfig::static_tensorwise();
    let static_config = Fp8LinearConfig::default()
        .with_input(static_cast)
        .with_weight(static_cast);
    for (name, recipe) in [
        ("static", Recipe::from(static_config.clone())),
        ("tensorwise", RecipeName::Tensorwise.into()),
        ("delayed", RecipeName::Delayed.into()),
    ] {
        let (_vars, net) = calibrated(recipe);
        let dir = dir();
        let report = save_calibrated(&net, dir.path()).unwrap();
        let loaded =
            Net::new(var_builder(&[&report.model], DType::F32, &device()).unwrap()).unwrap();
        // The scales of the calibration, in the model and in the loaded one.
        let expected = eval(&net, static_config.clone(), &ids(1));
        assert_same(name, &loaded.forward(&ids(1)).unwrap(), &expected);
    }
}

#[test]
fn rowwise_exports_a_scale_per_channel_and_scales_inputs_per_token() {
    let (_vars, net) = calibrated(RecipeName::Rowwise);
    let state = net.blocks[0].fc1.fp8_state().unwrap();
    let casts = state.calibration().unwrap();
    assert_eq!(casts.weight.granularity, Granularity::Rowwise);
    let dir = dir();
    let report = save_calibrated(&net, dir.path()).unwrap();
    let tensors = contents(&report.model);
    assert_eq!(
        tensors["blocks.1.fc1.weight"],
        (Dtype::F8_E4M3, vec![HIDDEN, WIDTH])
    );
    assert_eq!(
        tensors["blocks.1.fc1.weight_scale"],
        (Dtype::F32, vec![HIDDEN, 1])
    );
    assert_eq!(
        tensors["blocks.0.fc2.weight_scale"],
        (Dtype::F32, vec![WIDTH, 1])
    );
    let input_scales: Vec<_> = tensors
        .keys()
        .filter(|n| n.contains("input_scale"))
        .collect();
    assert_eq!(input_scales, Vec::<&String>::new());
    let group = &json_of(&report.config)["quantization_config"]["config_groups"]["group_0"];
    assert_eq!(group["weights"]["strategy"], "channel");
    assert_eq!(group["input_activations"]["strategy"], "token");
    assert_eq!(group["input_activations"]["dynamic"], true);

    let exact = Fp8LinearConfig::from_recipe_name(RecipeName::Rowwise)
        .with_round_scales_to_power_of_two(false);
    calibrate(&net, exact.clone());
    let report = save_calibrated(&net, dir.path()).unwrap();
    let expected = eval(&net, exact, &ids(2));
    for vb in [
        var_builder(&[&report.model], DType::F32, &device()).unwrap(),
        candle_var_builder(&report.model, DType::F32),
    ] {
        let loaded = Net::new(vb).unwrap();
        assert_rowwise(&loaded, false);
        assert_served("exact", &loaded.forward(&ids(2)).unwrap(), &expected);
    }
}

#[test]
fn powers_of_two_of_inputs_are_announced_only_when_asked_for() {
    const KEY: &str = "fp8_power_of_two_inputs";
    let (_vars, net) = calibrated(RecipeName::Rowwise);
    let vb = |report: &ExportReport| var_builder(&[&report.model], DType::F32, &device()).unwrap();
    let told = |report: &ExportReport| {
        let file = Checkpoint::open(&[&report.model]).unwrap();
        file.metadata(KEY).map(str::to_string)
    };
    let in_memory = eval(&net, RecipeName::Rowwise, &ids(2));

    // Readers with and without the metadata compute the same.
    let usual = dir();
    let report = save_calibrated(&net, usual.path()).unwrap();
    assert_eq!(told(&report), None);
    let loaded = Net::new(vb(&report)).unwrap();
    assert_rowwise(&loaded, false);
    let exact = loaded.forward(&ids(2)).unwrap();
    let candles = Net::new(candle_var_builder(&report.model, DType::F32)).unwrap();
    assert_same("whoever reads", &candles.forward(&ids(2)).unwrap(), &exact);
    assert_differ("the recipe has powers of two", &exact, &in_memory);

    let asked = ExportOptions::new().with_power_of_two_inputs(true);
    let private = dir();
    let report = save_calibrated_with(&net, private.path(), &asked).unwrap();
    let layers = r#"["blocks.0.fc1","blocks.0.fc2","blocks.1.fc1","blocks.1.fc2"]"#;
    assert_eq!(told(&report).as_deref(), Some(layers));
    let loaded = Net::new(vb(&report)).unwrap();
    assert_rowwise(&loaded, true);
    assert_same("asked for", &loaded.forward(&ids(2)).unwrap(), &in_memory);

    // The same holds for a loaded model.
    let again = dir();
    let report = save_calibrated(&loaded, again.path()).unwrap();
    assert_eq!(told(&report), None);
    let copy = Net::new(vb(&report)).unwrap();
    assert_same("copied", &copy.forward(&ids(2)).unwrap(), &exact);
    let report = save_calibrated_with(&loaded, again.path(), &asked).unwrap();
    assert_eq!(told(&report).as_deref(), Some(layers));
}

/// The weights have a scale for each row, the inputs are cast with one for each token.
#[track_caller]
fn assert_rowwise(net: &Net, powers_of_two: bool) {
    let weight = net.blocks[0].fc1.static_weight().unwrap();
    let scaling = weight.input_scaling();
    assert!(
        matches!(scaling, InputScaling::DynamicPerToken { power_of_two, .. } if *power_of_two == powers_of_two),
        "{scaling:?}"
    );
    assert_eq!(weight.codes().granularity(), Granularity::Rowwise);
}

#[test]
fn gradients_pass_through_a_loaded_layer() {
    let (_vars, net) = calibrated(delayed(16));
    let dir = dir();
    let report = save_calibrated(&net, dir.path()).unwrap();
    let loaded = Net::new(var_builder(&[&report.model], DType::F32, &device()).unwrap()).unwrap();
    let layer = &loaded.blocks[0].fc1;
    let (x, go) = (var(3, &[5, WIDTH]), tensor(4, &[5, HIDDEN]));
    let y = layer.forward(&x).unwrap();
    let grads = (&y * &go).unwrap().sum_all().unwrap().backward().unwrap();
    let weight = layer
        .static_weight()
        .unwrap()
        .codes()
        .dequantize(DType::F32)
        .unwrap();
    assert_close(
        "grad_x",
        grads.get(&x).unwrap(),
        &go.matmul(&weight).unwrap(),
        two_products(&[HIDDEN]),
    );
}

#[test]
fn a_model_loads_in_half_precision_too() {
    let (_vars, net) = calibrated(delayed(16));
    let dir = dir();
    let report = save_calibrated(&net, dir.path()).unwrap();
    let expected = eval(&net, delayed(16), &ids(1));
    for vb in [
        var_builder(&[&report.model], DType::BF16, &device()).unwrap(),
        candle_var_builder(&report.model, DType::BF16),
    ] {
        let loaded = Net::new(vb).unwrap();
        let y = loaded.forward(&ids(1)).unwrap();
        assert_eq!(y.dtype(), DType::BF16);
        let scale = loaded.blocks[0]
            .fc1
            .static_weight()
            .unwrap()
            .codes()
            .dequant_scale()
            .dtype();
        assert_eq!(scale, DType::F32, "scales stay f32");
        assert_close("bf16", &y.to_dtype(DType::F32).unwrap(), &expected, 0.1);
    }
}

#[test]
fn a_stock_layer_gets_the_dequantized_weight_through_our_var_builder() {
    if skipped_on_cuda("candle 0.11 casts nothing to or from F8E4M3 there") {
        return;
    }
    for recipe in [RecipeName::Delayed, RecipeName::Rowwise] {
        let (_vars, net) = calibrated(recipe);
        let dir = dir();
        let report = save_calibrated(&net, dir.path()).unwrap();
        let vb = var_builder(&[&report.model], DType::F32, &device()).unwrap();
        let stock = candle_nn::linear(WIDTH, HIDDEN, vb.pp("blocks.0.fc1")).unwrap();
        let file = Checkpoint::open(&[&report.model]).unwrap();
        let codes = file.tensor("blocks.0.fc1.weight", &device()).unwrap();
        let scale = file.tensor("blocks.0.fc1.weight_scale", &device()).unwrap();
        let codes = codes.to_dtype(DType::F32).unwrap();
        let value = match recipe {
            RecipeName::Rowwise => codes.broadcast_mul(&scale).unwrap(),
            _ => codes
                .broadcast_mul(&scale.reshape((1, 1)).unwrap())
                .unwrap(),
        };
        assert_same(&format!("{recipe}"), stock.weight(), &value);
        assert_close(
            &format!("{recipe}"),
            stock.weight(),
            &net.blocks[0].fc1.weight().unwrap(),
            0.04,
        );
    }
}

#[test]
fn several_files_make_one_checkpoint_unless_they_share_a_name() {
    let (_vars, net) = calibrated(delayed(16));
    let dir = dir();
    let report = save_calibrated(&net, dir.path()).unwrap();
    let whole = Checkpoint::open(&[&report.model]).unwrap();
    let paths = [
        dir.path().join("a.safetensors"),
        dir.path().join("b.safetensors"),
    ];
    let mut parts = [BTreeMap::new(), BTreeMap::new()];
    for (i, name) in whole.names().into_iter().enumerate() {
        parts[i % 2].insert(name.to_string(), whole.tensor(name, &device()).unwrap());
    }
    for (path, part) in paths.iter().zip(&parts) {
        fp8::atomic::write_safetensors_atomic(path, part, None).unwrap();
    }
    let loaded = Net::new(var_builder(&paths, DType::F32, &device()).unwrap()).unwrap();
    assert_same(
        "two files",
        &loaded.forward(&ids(1)).unwrap(),
        &eval(&net, delayed(16), &ids(1)),
    );
    let error = Checkpoint::open(&[&report.model, &paths[0]]).unwrap_err();
    assert_text(
        "twice",
        error,
        &["blocks.0.fc1", "model.safetensors", "a.safetensors"],
    );
}
