//! What the file contains, and how much memory it takes when loaded.

use crate::net::*;
use candle_core::{DType, Module, Tensor};
use fp8::checkpoint::quantized_tensors;
use fp8::config::RecipeName;
use fp8::load::{Checkpoint, var_builder};
use fp8::{Role, save_calibrated};
use fp8_test_support::{
    assert_close, assert_same, delayed, device, flat, prepare, skipped_on_cuda,
};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;

#[test]
fn the_file_holds_what_compressed_tensors_prescribes() {
    let (_vars, net) = calibrated(delayed(16));
    let dir = dir();
    fs::write(
        dir.path().join("config.json"),
        r#"{"model_type": "net", "hidden_size": 16, "quantization_config": {"old": true}, "z": [1]}"#,
    )
    .unwrap();
    let report = save_calibrated(&net, dir.path()).unwrap();
    assert_eq!(report.model, dir.path().join("model.safetensors"));
    assert_eq!(report.config, dir.path().join("config.json"));
    assert_eq!(names_in(dir.path()), ["config.json", "model.safetensors"]);
    let layers = [
        "blocks.0.fc1",
        "blocks.0.fc2",
        "blocks.1.fc1",
        "blocks.1.fc2",
    ];
    assert_eq!(
        (report.quantized.as_slice(), report.ignored.as_slice()),
        (&layers.map(String::from)[..], &["head".to_string()][..])
    );

    let mut expected: BTreeMap<String, (Dtype, Vec<usize>)> = BTreeMap::new();
    let mut put = |name: &str, dtype, shape: &[usize]| {
        expected.insert(name.to_string(), (dtype, shape.to_vec()));
    };
    for i in 0..2 {
        put(
            &format!("blocks.{i}.fc1.weight"),
            Dtype::F8_E4M3,
            &[HIDDEN, WIDTH],
        );
        put(&format!("blocks.{i}.fc1.bias"), Dtype::F32, &[HIDDEN]);
        put(
            &format!("blocks.{i}.fc2.weight"),
            Dtype::F8_E4M3,
            &[WIDTH, HIDDEN],
        );
        for layer in ["fc1", "fc2"] {
            for scale in ["weight_scale", "input_scale"] {
                put(&format!("blocks.{i}.{layer}.{scale}"), Dtype::F32, &[1]);
            }
        }
    }
    put("embed.weight", Dtype::F32, &[VOCAB, WIDTH]);
    put("norm.weight", Dtype::F32, &[WIDTH]);
    put("norm.bias", Dtype::F32, &[WIDTH]);
    put("scale", Dtype::F32, &[WIDTH]);
    put("head.weight", Dtype::F32, &[VOCAB, WIDTH]);
    put("head.bias", Dtype::F32, &[VOCAB]);
    assert_eq!(contents(&report.model), expected);

    let config = json_of(&report.config);
    for (key, value) in [
        ("model_type", json!("net")),
        ("hidden_size", json!(16)),
        ("z", json!([1])),
    ] {
        assert_eq!(config[key], value, "{key} is kept");
    }
    let quantization = &config["quantization_config"];
    let args = |strategy: &str| {
        json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": strategy,
               "dynamic": false, "group_size": null})
    };
    for (pointer, value) in [
        ("/quant_method", json!("compressed-tensors")),
        ("/format", json!("float-quantized")),
        ("/quantization_status", json!("compressed")),
        ("/ignore", json!(["head"])),
        ("/kv_cache_scheme", Value::Null),
        ("/config_groups/group_0/targets", json!(["Linear"])),
        ("/config_groups/group_0/weights", args("tensor")),
        ("/config_groups/group_0/input_activations", args("tensor")),
        ("/config_groups/group_0/output_activations", Value::Null),
    ] {
        assert_eq!(quantization.pointer(pointer), Some(&value), "{pointer}");
    }
    assert_eq!(
        quantization.get("old"),
        None,
        "the old quantization_config is replaced"
    );
}

#[test]
fn the_scales_are_amax_over_448_and_other_tensors_are_unchanged() {
    if skipped_on_cuda("candle 0.11 casts nothing to or from F8E4M3 there") {
        return;
    }
    let (vars, net) = calibrated(delayed(16));
    let dir = dir();
    let report = save_calibrated(&net, dir.path().join("any name.safetensors")).unwrap();
    assert_eq!(
        names_in(dir.path()),
        ["any name.safetensors", "config.json"]
    );
    let file = Checkpoint::open(&[&report.model]).unwrap();
    let vars = vars.data().lock().unwrap();
    let amax = |x: &Tensor| flat(x).into_iter().fold(0f32, |max, x| max.max(x.abs()));
    for layer in net.linears() {
        let path = layer.path().unwrap();
        let scale = flat(
            &file
                .tensor(&format!("{path}.weight_scale"), &device())
                .unwrap(),
        )[0];
        assert_eq!(
            scale,
            1. / (448. / amax(&layer.weight().unwrap())),
            "{path}.weight_scale"
        );
        let state = layer.fp8_state().unwrap();
        let state = state.slot(Role::Input).unwrap().tensors().unwrap();
        let input = file
            .tensor(&format!("{path}.input_scale"), &device())
            .unwrap();
        assert_same(&format!("{path}.input_scale"), &input, &state.dequant_scale);
        let codes = file.tensor(&format!("{path}.weight"), &device()).unwrap();
        let largest = amax(&codes.to_dtype(DType::F32).unwrap());
        assert_eq!(largest, 448., "{path}: the largest code");
    }
    // The input of the first layer, computed by hand: embedding times scale over the calibration batches.
    let mut first = 0f32;
    for seed in 0..3 {
        let x = net
            .embed
            .forward(&ids(seed))
            .unwrap()
            .broadcast_mul(net.scale.tensor())
            .unwrap();
        first = first.max(amax(&x));
    }
    let scale = flat(&file.tensor("blocks.0.fc1.input_scale", &device()).unwrap())[0];
    assert_eq!(scale, 1. / (448. / first), "input_scale of the first layer");
    for name in [
        "embed.weight",
        "norm.bias",
        "scale",
        "head.weight",
        "blocks.1.fc1.bias",
    ] {
        assert_same(
            name,
            &file.tensor(name, &device()).unwrap(),
            vars[name].as_tensor(),
        );
    }
}

#[test]
fn a_loaded_layer_holds_one_byte_per_weight() {
    for (recipe, scales) in [(RecipeName::Delayed, 1), (RecipeName::Rowwise, HIDDEN)] {
        let (_vars, net) = calibrated(recipe);
        let dir = dir();
        let report = save_calibrated(&net, dir.path()).unwrap();
        for vb in [
            var_builder(&[&report.model], DType::F32, &device()).unwrap(),
            candle_var_builder(&report.model, DType::F32),
        ] {
            let mut loaded = Net::new(vb).unwrap();
            let layer = &loaded.blocks[0].fc1;
            // The packed form of the kernels pads both sizes to multiples of 32.
            let padded = HIDDEN.next_multiple_of(32) * WIDTH.next_multiple_of(32);
            let bytes = HIDDEN * WIDTH + 4 * scales..=padded + 4 * scales;
            assert!(bytes.contains(&layer.weight_bytes()), "{recipe}");
            assert!(layer.static_weight().is_some(), "{recipe}: codes only");
            let value = layer.weight().unwrap();
            assert_eq!(
                value.dtype(),
                DType::F32,
                "{recipe}: the value, not the codes"
            );
            assert_close(
                &format!("{recipe}"),
                &value,
                &net.blocks[0].fc1.weight().unwrap(),
                0.04,
            );
            assert!(
                bytes.contains(&layer.weight_bytes()),
                "{recipe}: nothing is kept"
            );
            assert_eq!(layer.features(), (HIDDEN, WIDTH));
            assert_eq!(net.blocks[0].fc1.weight_bytes(), 4 * HIDDEN * WIDTH);
            assert_eq!(
                loaded.head.weight_bytes(),
                4 * VOCAB * WIDTH,
                "the head is f32"
            );
            let report = prepare(&mut loaded);
            assert_eq!((report.converted(), report.skipped()), (1, 4), "{report}");
            let reason = "the weight is FP8 already (static inference)";
            assert!(report.to_string().contains(reason), "{report}");
            assert_eq!(quantized_tensors(&loaded), 0);
        }
    }
}
