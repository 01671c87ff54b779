//! Configurations that are not supported or contradict their files, and dtypes that weights cannot have.

use candle_core::DType;
use fp8::FilesError;
use fp8::load::var_builder;
use fp8::nn::InputScaling;
use fp8_test_support::configured::{args, compressed, file, layer};
use fp8_test_support::files::{codes, write_config};
use fp8_test_support::{assert_text, device};
use serde_json::{Value, json};

#[test]
fn unsupported_configurations_are_refused_by_name() {
    let tensor = || args("tensor", json!({}));
    let with = |key: &str, value: Value| {
        let mut config = compressed("float-quantized", tensor(), Value::Null);
        config["quantization_config"][key] = value;
        config
    };
    let weights = |more: Value| compressed("float-quantized", args("tensor", more), Value::Null);
    let inputs =
        |strategy: &str, more| compressed("float-quantized", tensor(), args(strategy, more));
    let fp8 = |more: Value| {
        let mut config = json!({"quantization_config": {"quant_method": "fp8",
            "activation_scheme": "dynamic"}});
        for (key, value) in more.as_object().unwrap() {
            config["quantization_config"][key] = value.clone();
        }
        config
    };
    let cases = [
        (with("quant_method", json!("gptq")), "quant_method", "gptq"),
        (with("quant_method", json!(7)), "quant_method", "7"),
        (
            with("format", json!("pack-quantized")),
            "format",
            "pack-quantized",
        ),
        (
            with("format", json!("int-quantized")),
            "format",
            "int-quantized",
        ),
        (with("config_groups", json!([1])), "config_groups", "[1]"),
        (
            with("quantization_status", json!("initialized")),
            "quantization_status",
            "initialized",
        ),
        (weights(json!({"num_bits": 6})), "FP8.weights.num_bits", "6"),
        (weights(json!({"type": "int"})), "FP8.weights.type", "int"),
        (
            weights(json!({"symmetric": false})),
            "FP8.weights.symmetric",
            "false",
        ),
        (
            weights(json!({"dynamic": true})),
            "FP8.weights.dynamic",
            "true",
        ),
        (
            weights(json!({"strategy": "tensor_group"})),
            "FP8.weights",
            "tensor_group",
        ),
        (
            weights(json!({"strategy": "group", "group_size": 64})),
            "FP8.weights",
            "64",
        ),
        (
            weights(json!({"strategy": "block"})),
            "FP8.weights.block_structure",
            "null",
        ),
        (
            weights(json!({"strategy": "block", "block_structure": [0, 128]})),
            "block_structure",
            "0",
        ),
        (inputs("token", json!({})), "FP8.input_activations", "token"),
        (
            inputs("tensor", json!({"dynamic": "local"})),
            "input_activations.dynamic",
            "local",
        ),
        (
            inputs("tensor", json!({"num_bits": 16})),
            "input_activations.num_bits",
            "16",
        ),
        (
            inputs("channel", json!({})),
            "FP8.input_activations",
            "channel",
        ),
        (fp8(json!({"fmt": "e5m2"})), "fmt", "e5m2"),
        (fp8(json!({"scale_fmt": "e4m3"})), "scale_fmt", "e4m3"),
        (
            fp8(json!({"activation_scheme": "none"})),
            "activation_scheme",
            "none",
        ),
        (
            fp8(json!({"weight_block_size": [128]})),
            "weight_block_size",
            "[128]",
        ),
    ];
    for (config, key, value) in cases {
        let dir = tempfile::tempdir().unwrap();
        file(dir.path(), &[1], None);
        write_config(dir.path(), &config);
        let error = var_builder(
            &[dir.path().join("model.safetensors")],
            DType::F32,
            &device(),
        )
        .map(|_| ())
        .unwrap_err();
        assert!(
            matches!(&error, FilesError::UnsupportedScheme { .. }),
            "{error:?}"
        );
        assert_text(key, error, &["config.json", key, value]);
    }
}

#[test]
fn a_configuration_that_contradicts_the_file_is_refused() {
    let weight_only =
        |strategy: &str| compressed("float-quantized", args(strategy, json!({})), Value::Null);
    let with = |key: &str, value: Value| {
        let mut config = weight_only("tensor");
        config["quantization_config"][key] = value;
        config
    };
    let group = |targets: Value| {
        let group = json!({"targets": targets, "weights": args("tensor", json!({}))});
        with("config_groups", json!({"a": group}))
    };
    let static_inputs = compressed(
        "float-quantized",
        args("tensor", json!({})),
        args("tensor", json!({})),
    );
    let cases: [(Value, Option<f32>, &[&str]); 8] = [
        (
            with("ignore", json!(["fc"])),
            None,
            &["`fc`", "config.json", "high precision"],
        ),
        (
            with("ignore", json!(["re:f.*"])),
            None,
            &["`fc`", "high precision"],
        ),
        (
            group(json!(["fc.weight", "re:c"])),
            None,
            &["`fc`", "high precision"],
        ),
        (group(json!([])), None, &["`fc`", "high precision"]),
        (
            weight_only("channel"),
            None,
            &["`fc.weight_scale`", "[1]", "[6, 1]"],
        ),
        (
            weight_only("tensor"),
            Some(0.1),
            &["`fc`", "`fc.input_scale`"],
        ),
        (static_inputs, None, &["`fc.input_scale`", "static"]),
        (group(json!(["re:(("])), None, &["targets", "pattern"]),
    ];
    for (config, input_scale, parts) in cases {
        let dir = tempfile::tempdir().unwrap();
        file(dir.path(), &[1], input_scale);
        write_config(dir.path(), &config);
        let error = layer(dir.path()).unwrap_err();
        assert_text(&config.to_string(), error, parts);
    }
    // A file that is not JSON.
    let dir = tempfile::tempdir().unwrap();
    file(dir.path(), &[1], None);
    std::fs::write(dir.path().join("config.json"), "{").unwrap();
    assert_text(
        "broken",
        layer(dir.path()).unwrap_err(),
        &["config.json", "not valid"],
    );
    // A configuration that says nothing about quantization leaves it to the shapes.
    write_config(dir.path(), &json!({"model_type": "llama"}));
    let scaling = layer(dir.path()).unwrap();
    assert!(matches!(
        scaling.static_weight().unwrap().input_scaling(),
        InputScaling::DynamicPerToken {
            power_of_two: false,
            ..
        }
    ));
}

#[test]
fn patterns_that_would_take_forever_are_given_up() {
    let dir = tempfile::tempdir().unwrap();
    file(dir.path(), &[1], None);
    let deep = "(".repeat(100_000);
    let patterns = [
        deep.as_str(),
        "(?:(?=f)f){4000000000}",
        "((f{1000}){1000}){1000}",
        "(?=(f+)+c)(f|fc)*\\1$",
        "(?<=f{1000000})",
        "\u{0}",
    ];
    for pattern in patterns {
        let group =
            json!({"targets": [format!("re:{pattern}")], "weights": args("tensor", json!({}))});
        let mut config = compressed("float-quantized", Value::Null, Value::Null);
        config["quantization_config"]["config_groups"] = json!({"a": group});
        write_config(dir.path(), &config);
        // None of them matches this layer; matching may also give up.
        let error = layer(dir.path()).unwrap_err();
        assert!(error.len() < 2_000, "{} bytes of text", error.len());
    }
}

#[test]
fn weights_are_loaded_in_floating_point_dtypes_only() {
    let dir = tempfile::tempdir().unwrap();
    file(dir.path(), &[1], None);
    let path = dir.path().join("model.safetensors");
    for dtype in [DType::U8, DType::U32, DType::I64, DType::F8E4M3] {
        let error = var_builder(&[&path], dtype, &device())
            .map(|_| ())
            .unwrap_err();
        assert!(
            matches!(&error, FilesError::BuilderDType { got } if *got == dtype),
            "{error:?}"
        );
        assert_text("dtype", error, &[dtype.as_str(), "f32, bf16, f16 or f64"]);
    }
    let vb = var_builder(&[&path], DType::F32, &device()).unwrap();
    for (name, dtype, text) in [
        ("fc.weight", DType::U32, "u32"),
        ("fc.weight_scale", DType::U8, "u8"),
    ] {
        let error = vb.get_unchecked_dtype(name, dtype).unwrap_err();
        assert_text(name, error, &[text, "f32, bf16, f16 or f64"]);
    }
    // U8 means the codes.
    let weight = vb.get_unchecked_dtype("fc.weight", DType::U8).unwrap();
    let stored = weight.flatten_all().unwrap().to_vec1::<u8>().unwrap();
    assert_eq!(stored, codes(weight.elem_count()));
}
