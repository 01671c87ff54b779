//! The report of `prepare_fp8`: what is converted, what is not, and why.

use super::*;
use candle_core::{DType, Module, Tensor};
use fp8::config::{LayerFilter, RecipeName};
use fp8::nn::Linear;
use fp8::{PrepareOptions, PrepareReport, Recipe, fp8_autocast, prepare_fp8};
use fp8_test_support::{
    Mlp, assert_differ, assert_same, delayed, of, prepare, recipes, slots, tensor, values,
};

#[test]
fn the_report_names_every_linear_layer_and_prints_as_a_table() {
    let (_vars, mlp) = new_mlp(1);
    let filter = LayerFilter::new().skip_paths(["down"]);
    let report = prepare_fp8(&mlp, &filter.into()).unwrap();
    assert_outcomes(
        "report",
        &report,
        &[("up", "fp8"), ("down", "path contains `down`")],
    );
    assert_eq!((report.converted(), report.skipped()), (1, 1));
    let up = report.get("up").unwrap();
    assert_eq!((up.out_features, up.in_features), (Mlp::HIDDEN, Mlp::IN));
    assert_eq!(report.get("sideways"), None);
    let expected = "\
layer      [out, in]  result
up          [20, 12]  fp8 (no export under blockwise, mxfp8)
down         [6, 20]  high precision: path contains `down`
no export: the layer trains under these recipes, but their block does not divide its in_features, so no file can hold its \
scales. Leave it out with PrepareOptions::with_off(path), quantize with --ignore path, or store it by rows with ExportOptions::with_ragged
1 converted, 1 left in high precision";
    assert_eq!(report.to_string(), expected);
    assert_eq!(
        PrepareReport::default().to_string().lines().count(),
        2,
        "an empty table prints"
    );
}

/// Layers whose features are not multiples of the block size (128 or 32) train, and are reported as not exportable.
#[test]
fn layers_that_no_file_can_hold_are_named() {
    let named = |names: &[RecipeName]| names.iter().map(|&name| name.into()).collect::<Vec<_>>();
    let (blockwise, mxfp8) = (RecipeName::Blockwise, RecipeName::Mxfp8);
    for (features, own, expected) in [
        (688, None, vec![blockwise, mxfp8]),
        (672, None, vec![blockwise]),
        (640, None, vec![]),
        (688, Some("mxfp8"), vec![mxfp8]),
        (688, Some("rowwise"), vec![]),
    ] {
        let layer = Linear::new(tensor(1, &[4, features]), None).with_path("down");
        let mut options = PrepareOptions::default();
        if let Some(own) = own {
            options = options
                .with_recipe("down", own.parse::<Recipe>().unwrap())
                .unwrap();
        }
        let report = prepare_fp8(&layer, &options).unwrap();
        let case = format!("{features} features, {own:?}");
        assert_eq!(
            report.layers[0].without_export(),
            named(&expected),
            "{case}"
        );
        let text = report.to_string();
        for part in ["with_off(path)", "--ignore"] {
            assert_eq!(text.contains(part), !expected.is_empty(), "{case}: {text}");
        }
    }
}

#[test]
fn filters_skip_and_say_why() {
    let min = LayerFilter::new().with_min_dims(8, 0);
    let multiple = LayerFilter::new().with_multiple_of(4);
    let custom = LayerFilter::new().with_custom(|path, n, k| path == "up" && n > k);
    let auto = LayerFilter::new().with_auto(RecipeName::Tensorwise);
    let up = (Mlp::HIDDEN, Mlp::IN);
    assert_eq!((up, Mlp::OUT), ((20, 12), 6), "the reasons below");
    for (case, filter, expected) in [
        ("default", LayerFilter::new(), ["fp8", "fp8"]),
        ("min", min, ["fp8", "N = 6 is below 8"]),
        (
            "multiple",
            multiple,
            ["fp8", "N = 6 is not a multiple of 4"],
        ),
        ("custom", custom, ["fp8", "custom filter"]),
        (
            "auto",
            auto,
            [
                "N = 20 is not a multiple of 16",
                "N = 6 is not a multiple of 16",
            ],
        ),
    ] {
        let (_vars, mlp) = new_mlp(2);
        let report = prepare_fp8(&mlp, &PrepareOptions::default().with_filter(filter)).unwrap();
        assert_outcomes(case, &report, &[("up", expected[0]), ("down", expected[1])]);
        let prepared = [&mlp.up, &mlp.down].map(|layer| layer.fp8_state().is_some());
        assert_eq!(
            prepared,
            expected.map(|text| text == "fp8"),
            "{case}: state"
        );
    }
}

#[test]
fn layers_not_prepared_stay_in_high_precision_inside_a_guard() {
    let (_vars, mlp) = new_mlp(3);
    prepare_fp8(&mlp, &LayerFilter::new().skip_paths(["down"]).into()).unwrap();
    let (x, h) = (tensor(4, &[3, Mlp::IN]), tensor(5, &[3, Mlp::HIDDEN]));
    let plain = |layer: &Linear, x: &Tensor| {
        let bias = layer.bias().cloned();
        candle_nn::Linear::new(layer.weight().unwrap(), bias)
            .forward(x)
            .unwrap()
    };
    for (name, recipe) in recipes() {
        let _guard = fp8_autocast(recipe).unwrap();
        let case = format!("{name}, down");
        assert_same(&case, &mlp.down.forward(&h).unwrap(), &plain(&mlp.down, &h));
        let case = format!("{name}, up");
        assert_differ(&case, &mlp.up.forward(&x).unwrap(), &plain(&mlp.up, &x));
    }
    assert_eq!(mlp.down.fp8_state().map(|s| s.path().to_string()), None);
}

#[test]
fn a_layer_that_is_skipped_later_loses_its_state() {
    let (_vars, mut mlp) = new_mlp(6);
    assert_eq!(prepare(&mut mlp).converted(), 2);
    let filter = LayerFilter::new().skip_paths(["down"]);
    let report = prepare_fp8(&mlp, &filter.into()).unwrap();
    let expected = [
        ("up", "fp8: was prepared before"),
        ("down", "path contains `down`"),
    ];
    assert_outcomes("second time", &report, &expected);
    assert!(
        mlp.down.fp8_state().is_none(),
        "the report says high precision"
    );
    assert!(mlp.up.fp8_state().is_some());
}

#[test]
fn preparing_twice_keeps_the_state() {
    let (_vars, mut mlp) = new_mlp(7);
    prepare(&mut mlp);
    {
        let _guard = fp8_autocast(delayed(4)).unwrap();
        mlp.forward(&tensor(8, &[3, Mlp::IN])).unwrap();
    }
    let before = [&mlp.up, &mlp.down].map(slots);
    let report = prepare(&mut mlp);
    let note = "fp8: was prepared before";
    assert_outcomes("second time", &report, &[("up", note), ("down", note)]);
    assert_eq!([&mlp.up, &mlp.down].map(slots), before);
    assert_ne!(before[0][0].quant_scale, 1., "there was a state to keep");
}

#[test]
fn the_history_length_of_fresh_state_is_an_option() {
    let (_vars, mlp) = new_mlp(9);
    let options = PrepareOptions::default().with_amax_history_len(16);
    prepare_fp8(&mlp, &options).unwrap();
    for slot in slots(&mlp.up) {
        assert_eq!((slot.quant_scale, slot.history), (1., vec![0.; 16]));
    }
}

#[test]
fn weights_with_nan_or_inf_are_reported_and_skipped() {
    for (bad, reason) in [
        (f32::NAN, "the weight holds 1 NaN and 0 Inf of 12 values"),
        (
            f32::INFINITY,
            "the weight holds 0 NaN and 1 Inf of 12 values",
        ),
        (
            f32::NEG_INFINITY,
            "the weight holds 0 NaN and 1 Inf of 12 values",
        ),
    ] {
        let mut weight = values(10, 12);
        weight[7] = bad;
        let layer = |weight: Tensor, path: &str| Linear::new(weight, None).with_path(path);
        let mut model = (
            layer(of(&weight, &[3, 4]), "bad"),
            layer(tensor(11, &[3, 4]), "good"),
        );
        let report = prepare(&mut model);
        assert_outcomes(
            &bad.to_string(),
            &report,
            &[("bad", reason), ("good", "fp8")],
        );
        let _guard = fp8_autocast(delayed(4)).unwrap();
        let x = tensor(12, &[2, 4]);
        let plain = candle_nn::Linear::new(model.0.weight().unwrap(), None);
        assert_same(
            "bad",
            &model.0.forward(&x).unwrap(),
            &plain.forward(&x).unwrap(),
        );
    }
}

#[test]
fn a_layer_without_a_path_or_with_a_strange_weight_is_skipped() {
    let no_path = Linear::new(tensor(13, &[3, 4]), None);
    let double = Linear::new(tensor(14, &[3, 4]).to_dtype(DType::F64).unwrap(), None);
    let mut model = (no_path, double.with_path("double"));
    let report = prepare(&mut model);
    let expected = [
        (
            "",
            "it has no path: build it from a VarBuilder or call with_path",
        ),
        ("double", "the weight is f64, not f32, bf16 or f16"),
    ];
    assert_outcomes("skipped", &report, &expected);
    let _guard = fp8_autocast(delayed(4)).unwrap();
    let x = tensor(15, &[2, 4]);
    let plain = candle_nn::Linear::new(model.0.weight().unwrap(), None)
        .forward(&x)
        .unwrap();
    assert_same("no path", &model.0.forward(&x).unwrap(), &plain);
}

#[test]
fn half_precision_weights_are_converted() {
    for dtype in [DType::BF16, DType::F16] {
        let weight = tensor(16, &[3, 4]).to_dtype(dtype).unwrap();
        let mut layer = Linear::new(weight, None).with_path("fc");
        assert_eq!(prepare(&mut layer).converted(), 1, "{dtype:?}");
        let _guard = fp8_autocast(delayed(4)).unwrap();
        let y = layer
            .forward(&tensor(17, &[2, 4]).to_dtype(dtype).unwrap())
            .unwrap();
        assert_eq!(y.dtype(), dtype);
    }
}

#[test]
fn one_path_for_two_weights_converts_the_first_only() {
    let layer = |seed| Linear::new(tensor(seed, &[3, 4]), None).with_path("fc");
    let mut model = (layer(18), layer(19));
    let report = prepare(&mut model);
    let expected = [("fc", "fp8"), ("fc", "another layer has the same path")];
    assert_outcomes("two weights", &report, &expected);
    assert!(model.1.fp8_state().is_none());
    // The same layer twice counts as one layer.
    let mut model = (layer(18), None::<Linear>);
    model.1 = Some(model.0.clone());
    let report = prepare(&mut model);
    let note = "fp8: shares its state with the same layer used before";
    assert_outcomes("one weight", &report, &[("fc", "fp8"), ("fc", note)]);
    let first = model.0.fp8_state().unwrap();
    let second = model.1.as_ref().unwrap().fp8_state().unwrap();
    assert!(std::sync::Arc::ptr_eq(&first, &second));
}
