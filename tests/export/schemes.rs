//! Each granularity is exported as itself: blocks, microscaling, several strategies in one file. And what is refused.

use candle_core::{DType, Module};
use candle_nn::{VarBuilder, VarMap};
use fp8::config::{CastConfig, Fp8LinearConfig, Recipe, RecipeName};
use fp8::fp8_core::{Cast, Format, Granularity};
use fp8::load::{Checkpoint, var_builder};
use fp8::{Error, ExportOptions, FilesError, Ragged, nn, save_calibrated, save_calibrated_with};
use fp8_test_support::calibrated::{
    HIDDEN, IN, Net, blocks, calibrate, casts, eval, fresh, quantization, x,
};
use fp8_test_support::{
    assert_same, assert_served, assert_text, device, fill, flat, of, prepare, tensor,
};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

#[test]
fn every_granularity_is_exported_as_itself_and_served() {
    let (tensorwise, row) = (
        CastConfig::dynamic_tensorwise(),
        CastConfig::dynamic_rowwise(),
    );
    let mx = CastConfig::dynamic_mx();
    let token = json!({"strategy": "token", "dynamic": true, "group_size": null});
    let fixed = json!({"strategy": "tensor", "dynamic": false, "group_size": null});
    let group = |size: usize| json!({"strategy": "group", "dynamic": true, "group_size": size});
    let bytes = json!({"strategy": "group", "dynamic": true, "group_size": 32,
                       "scale_dtype": "torch.uint8"});
    let cases = [
        (
            blocks(32, 32),
            blocks(1, 32),
            "block",
            &[3, 2][..],
            group(32),
        ),
        (blocks(40, 24), row, "block", &[3, 3], token.clone()),
        (blocks(1, 16), tensorwise, "block", &[96, 4], fixed.clone()),
        (row, tensorwise, "channel", &[96, 1], fixed),
        (tensorwise, row, "tensor", &[1], token),
        (tensorwise, blocks(1, 16), "tensor", &[1], group(16)),
        (mx, mx, "group", &[96, 2], bytes),
    ];
    for (weight, input, strategy, shape, inputs) in cases {
        let case = format!("{} by {}", weight.short(), input.short());
        let (net, dir) = (fresh(5), tempfile::tempdir().unwrap());
        calibrate(&net, casts(weight, input), &x());
        save_calibrated(&net, dir.path()).unwrap();
        // A single scale comes from the calibration and is that of the static cast.
        let as_served = |cast: CastConfig| match cast.granularity {
            Granularity::Tensorwise => CastConfig::static_tensorwise(),
            _ => cast,
        };
        let served_as = casts(as_served(weight), as_served(input));
        let expected = eval(&net, served_as, &x());
        let loaded = Net::load(dir.path());
        let got = loaded.forward(&x()).unwrap();
        match input.granularity {
            // A number stored in the file, or powers of two.
            Granularity::Tensorwise | Granularity::Mx => assert_same(&case, &got, &expected),
            _ => assert_served(&case, &got, &expected),
        }

        let file = Checkpoint::open(&[dir.path().join("model.safetensors")]).unwrap();
        assert_eq!(file.shape("up.weight_scale").unwrap(), shape, "{case}");
        let dtype = match weight.granularity {
            Granularity::Mx => Dtype::U8,
            _ => Dtype::F32,
        };
        assert_eq!(file.dtype("up.weight_scale").unwrap(), dtype, "{case}");
        let is_static = input.granularity == Granularity::Tensorwise;
        assert_eq!(file.dtype("up.input_scale").is_some(), is_static, "{case}");
        let quantization = quantization(dir.path());
        let group = &quantization["config_groups"]["group_0"];
        assert_eq!(group["targets"], json!(["Linear"]), "{case}");
        assert_eq!(group["weights"]["strategy"], strategy, "{case}");
        if let Granularity::Blockwise { rows, cols } = weight.granularity {
            let structure = json!([rows, cols]);
            assert_eq!(group["weights"]["block_structure"], structure, "{case}");
        }
        for (key, value) in inputs.as_object().unwrap() {
            assert_eq!(&group["input_activations"][key], value, "{case}: {key}");
        }
        let format = match weight.granularity {
            Granularity::Mx => "mxfp8-quantized",
            _ => "float-quantized",
        };
        assert_eq!(quantization["format"], format, "{case}");

        // Exported once more, from the loaded model.
        let again = tempfile::tempdir().unwrap();
        save_calibrated(&loaded, again.path()).unwrap();
        for name in ["model.safetensors", "config.json"] {
            let read = |dir: &Path| fs::read(dir.join(name)).unwrap();
            assert_eq!(read(dir.path()), read(again.path()), "{case}: {name} again");
        }
    }
}

/// Numbers in bf16 lie halfway between two codes more often than numbers in f32. A file rounds them as the calibrated model does.
#[test]
fn inputs_in_bf16_have_the_codes_of_the_calibrated_model() {
    // Eight significant bits each, up to 196 / 64.
    let value = |i: usize| {
        let size = (128 + i % 69) as f32 / 64. / (1 << (i / 69)) as f32;
        if i.is_multiple_of(2) { size } else { -size }
    };
    let values: Vec<f32> = (0..10 * IN).map(value).collect();
    let x = of(&values, &[10, IN]).to_dtype(DType::BF16).unwrap();
    let fixed = CastConfig::static_tensorwise();
    for (name, recipe) in [
        ("delayed", Recipe::from(RecipeName::Delayed)),
        ("static", Recipe::from(casts(fixed, fixed))),
    ] {
        let (net, dir) = (fresh(9), tempfile::tempdir().unwrap());
        calibrate(&net, recipe.clone(), &x);
        save_calibrated(&net, dir.path()).unwrap();
        let file = Checkpoint::open(&[dir.path().join("model.safetensors")]).unwrap();
        let scale = flat(&file.tensor("up.input_scale", &device()).unwrap())[0];
        let cast = Cast::new(Format::E4M3);
        let moves =
            |x: &f32| cast.encode_divided(*x, scale, 0) != cast.encode_scaled(*x, 1. / scale, 0);
        assert!(values.iter().any(moves), "{name}: both rules agree");
        let expected = eval(&net, recipe, &x);
        let got = Net::load(dir.path()).forward(&x).unwrap();
        assert_same(name, &got, &expected);
    }
}

#[test]
fn layers_with_different_strategies_go_into_different_groups() {
    let (net, dir) = (fresh(6), tempfile::tempdir().unwrap());
    let hidden = net.up.forward(&x()).unwrap().relu().unwrap();
    calibrate(&net.up, RecipeName::Tensorwise, &x());
    calibrate(
        &net.down,
        casts(CastConfig::dynamic_mx(), CastConfig::dynamic_mx()),
        &hidden,
    );
    let report = save_calibrated(&net, dir.path()).unwrap();
    assert_eq!(report.quantized, ["up", "down"]);
    let quantization = quantization(dir.path());
    assert_eq!(quantization["format"], "mixed-precision");
    let groups = &quantization["config_groups"];
    assert_eq!(groups.as_object().unwrap().len(), 2);
    for (group, target, format, strategy) in [
        ("group_0", "up", "float-quantized", "tensor"),
        ("group_1", "down", "mxfp8-quantized", "group"),
    ] {
        assert_eq!(groups[group]["targets"], json!([target]));
        assert_eq!(groups[group]["format"], format);
        assert_eq!(groups[group]["weights"]["strategy"], strategy);
    }
    let loaded = Net::load(dir.path());
    let static_cast = CastConfig::static_tensorwise();
    let up = eval(&net.up, casts(static_cast, static_cast), &x());
    assert_same("up", &loaded.up.forward(&x()).unwrap(), &up);
    let mx = casts(CastConfig::dynamic_mx(), CastConfig::dynamic_mx());
    let down = eval(&net.down, mx, &hidden);
    assert_same("down", &loaded.down.forward(&hidden).unwrap(), &down);
}

#[test]
fn recipes_that_the_format_cannot_express_are_refused() {
    let row = CastConfig::dynamic_rowwise();
    let mx = CastConfig::dynamic_mx();
    let cases: [(CastConfig, CastConfig, &[&str]); 5] = [
        (row, blocks(2, 32), &["`up`", "blockwise:2x32", "one token"]),
        (row, blocks(1, 48), &["`up`", "64", "48"]),
        (mx, row, &["`up`", "microscaled"]),
        (row, mx, &["`up`", "microscaled"]),
        (
            row.with_format(fp8::fp8_core::Format::E5M2),
            row,
            &["`up`", "weight", "e5m2", "e4m3"],
        ),
    ];
    for (weight, input, parts) in cases {
        let (net, dir) = (fresh(5), tempfile::tempdir().unwrap());
        calibrate(&net, casts(weight, input), &x());
        let error = save_calibrated(&net, dir.path().join("out")).unwrap_err();
        assert!(
            matches!(&error, Error::Files(FilesError::NotExportable { .. })),
            "{error:?}"
        );
        assert_text("refused", error, parts);
        assert_eq!(
            fs::read_dir(dir.path()).unwrap().count(),
            0,
            "nothing is made"
        );
    }
}

/// Recipes pad the last group of a tensor; files have whole groups only.
#[test]
fn features_that_do_not_divide_are_refused_or_stored_by_rows_or_in_high_precision() {
    for (recipe, groups) in [
        (RecipeName::Blockwise, "groups of 128"),
        (RecipeName::Mxfp8, "microscaled blocks of 32"),
    ] {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
        let mut net = (
            nn::linear(688, 128, vb.pp("down")).unwrap(),
            nn::linear(128, 40, vb.pp("up")).unwrap(),
        );
        fill(&vars, 8);
        prepare(&mut net);
        let (x, hidden) = (tensor(1, &[5, 688]), tensor(2, &[5, 128]));
        calibrate(&net.0, recipe, &x);
        calibrate(&net.1, recipe, &hidden);
        let dir = tempfile::tempdir().unwrap();
        let error = save_calibrated(&net, dir.path().join("out")).unwrap_err();
        assert!(
            matches!(&error, Error::Files(FilesError::NotExportable { .. })),
            "{error:?}"
        );
        let parts = ["`down`", "688", groups, "with_off", "with_ragged"];
        assert_text("refused", error, &parts);

        let options = ExportOptions::new().with_power_of_two_inputs(true);
        let by_rows = options.clone().with_ragged(Ragged::Rowwise);
        let report = save_calibrated_with(&net, dir.path(), &by_rows).unwrap();
        assert_eq!(report.quantized, ["down", "up"]);
        let open = || var_builder(&[&report.model], DType::F32, &device()).unwrap();
        let loaded = nn::linear(688, 128, open().pp("down")).unwrap();
        let held = loaded.static_weight().unwrap();
        assert_eq!(held.codes().granularity(), Granularity::Rowwise);
        // As the layer computes with one scale per row, rounded as in the recipe it was trained with.
        let pow2 = Fp8LinearConfig::from_recipe_name(recipe).round_scales_to_power_of_two;
        let rows = Fp8LinearConfig::from_recipe_name(RecipeName::Rowwise)
            .with_round_scales_to_power_of_two(pow2);
        let (got, expected) = (loaded.forward(&x).unwrap(), eval(&net.0, rows, &x));
        match pow2 {
            true => assert_same("by rows", &got, &expected),
            false => assert_served("by rows", &got, &expected),
        }
        let loaded = nn::linear(128, 40, open().pp("up")).unwrap();
        let expected = eval(&net.1, recipe, &hidden);
        assert_same("whole", &loaded.forward(&hidden).unwrap(), &expected);

        let plain = options.with_ragged(Ragged::HighPrecision);
        let report = save_calibrated_with(&net, dir.path(), &plain).unwrap();
        assert_eq!(
            (report.quantized, report.ignored),
            (vec!["up".into()], vec!["down".into()])
        );
    }
}

#[test]
fn a_layer_that_the_recipe_leaves_in_high_precision_is_exported_so() {
    let (net, dir) = (fresh(5), tempfile::tempdir().unwrap());
    calibrate(&net.up, RecipeName::Rowwise, &x());
    let off = CastConfig::disabled();
    let hidden = tensor(1, &[3, HIDDEN]);
    let config = casts(off, off)
        .with_weight_for_grad_input(Some(CastConfig::dynamic_tensorwise()))
        .with_input_for_grad_weight(Some(CastConfig::dynamic_tensorwise()));
    calibrate(&net.down, config, &hidden);
    let report = save_calibrated(&net, dir.path()).unwrap();
    assert_eq!(
        (report.quantized, report.ignored),
        (vec!["up".into()], vec!["down".into()])
    );
}

#[test]
fn a_weight_only_checkpoint_is_exported_weight_only() {
    let (net, dir) = (fresh(7), tempfile::tempdir().unwrap());
    calibrate(&net, RecipeName::Rowwise, &x());
    save_calibrated(&net, dir.path()).unwrap();
    let path = dir.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = Value::Null;
    fs::write(&path, config.to_string()).unwrap();
    let (loaded, again) = (Net::load(dir.path()), tempfile::tempdir().unwrap());
    save_calibrated(&loaded, again.path()).unwrap();
    assert_eq!(quantization(again.path())["format"], "naive-quantized");
    let served = Net::load(again.path()).forward(&x()).unwrap();
    assert_same("served", &served, &loaded.forward(&x()).unwrap());
}
