//! `config.json` decides how a checkpoint is loaded: weight-only, static and dynamic inputs, groups and blocks.

use candle_core::{DType, Module, Tensor};
use fp8::fp8_candle::Fp8Tensor;
use fp8::fp8_candle::ops::linear;
use fp8::fp8_core::{Cast, Contraction, Format, Granularity};
use fp8::nn::InputScaling;
use fp8_test_support::configured::{K, N, args, compressed, file, layer, scales};
use fp8_test_support::files::{codes, f32s, write, write_config};
use fp8_test_support::rounding::two_products;
use fp8_test_support::{assert_close, assert_differ, assert_same, device, flat, of, tensor};
use safetensors::Dtype;
use serde_json::{Value, json};

/// The weight of [`file`], dequantized by hand.
fn weight(granularity: Granularity, len: usize) -> Tensor {
    Fp8Tensor::from_parts(
        Tensor::from_vec(codes(N * K), (N, K), &device()).unwrap(),
        Format::E4M3,
        granularity,
        Contraction::Cols,
        of(&scales(len), &[len]),
    )
    .unwrap()
    .dequantize(DType::F32)
    .unwrap()
}

/// `x` after a cast by hand, in which every `group` neighbours have the quant_scale and the dequant_scale that `scales` gives for their
/// amax.
fn cast_in_groups(x: &Tensor, group: usize, scales: impl Fn(f32) -> [f32; 2]) -> Tensor {
    let cast = Cast::new(Format::E4M3);
    let values = flat(x);
    let values: Vec<f32> = values
        .chunks(group)
        .flat_map(|chunk| {
            let amax = chunk.iter().fold(0f32, |max, x| max.max(x.abs()));
            let [quant_scale, dequant_scale] = scales(amax);
            chunk
                .iter()
                .map(|x| Format::E4M3.decode(cast.encode(x * quant_scale, 0)) * dequant_scale)
                .collect::<Vec<_>>()
        })
        .collect();
    of(&values, x.dims())
}

/// The scales of a dynamic cast.
fn dynamic_scales(amax: f32) -> [f32; 2] {
    let quant_scale = 448. / amax;
    [quant_scale, 1. / quant_scale]
}

/// Inputs whose groups and rows differ in magnitude.
fn input() -> Tensor {
    let x = tensor(3, &[5, K]);
    let sizes: Vec<f32> = (0..5 * K).map(|i| 1. + (i / 64 * 7 % 11) as f32).collect();
    (x * of(&sizes, &[5, K])).unwrap()
}

fn product(x: &Tensor, weight: &Tensor) -> Tensor {
    x.matmul(&weight.t().unwrap()).unwrap()
}

#[test]
fn weight_only_checkpoints_run_weight_only() {
    let blocks = Granularity::Blockwise {
        rows: 128,
        cols: 128,
    };
    let cases: [(&str, Value, &[usize], Granularity); 3] = [
        ("tensor", json!({}), &[1], Granularity::Tensorwise),
        ("channel", json!({}), &[N, 1], Granularity::Rowwise),
        (
            "block",
            json!({"block_structure": [128, 128]}),
            &[1, 2],
            blocks,
        ),
    ];
    for (strategy, more, shape, granularity) in cases {
        let dir = tempfile::tempdir().unwrap();
        file(dir.path(), shape, None);
        let by_shape = layer(dir.path()).unwrap();
        let config = compressed("naive-quantized", args(strategy, more), Value::Null);
        write_config(dir.path(), &config);
        let layer = layer(dir.path()).unwrap();
        let held = layer.static_weight().unwrap();
        assert!(
            matches!(held.input_scaling(), InputScaling::None),
            "{strategy}"
        );
        assert_eq!(held.weight().granularity(), granularity, "{strategy}");
        assert!(layer.weight_bytes() < N.next_multiple_of(32) * K + 64);
        let x = input();
        let weight = weight(granularity, shape.iter().product());
        let plain = linear(&x, &weight, None).unwrap();
        let y = layer.forward(&x).unwrap();
        assert_same(&format!("{strategy}: high-precision product"), &y, &plain);
        let w8a8 = by_shape.forward(&x).unwrap();
        assert_differ("without a configuration inputs are cast", &w8a8, &y);
    }
}

#[test]
fn inputs_are_cast_as_the_configuration_says() {
    // The same file, with one scale, for each kind of input cast.
    let dynamic = json!({"dynamic": true});
    let group = |size: usize| json!({"dynamic": true, "group_size": size});
    let cases: [(&str, Value, usize); 4] = [
        ("token", dynamic.clone(), K),
        ("tensor", dynamic, 5 * K),
        ("group", group(128), 128),
        ("group", group(64), 64),
    ];
    for (strategy, more, size) in cases {
        let dir = tempfile::tempdir().unwrap();
        file(dir.path(), &[1], None);
        let config = compressed(
            "float-quantized",
            args("tensor", json!({})),
            args(strategy, more),
        );
        write_config(dir.path(), &config);
        let layer = layer(dir.path()).unwrap();
        let weight = weight(Granularity::Tensorwise, 1);
        let expected = product(&cast_in_groups(&input(), size, dynamic_scales), &weight);
        let case = format!("{strategy} of {size}");
        let y = layer.forward(&input()).unwrap();
        assert_close(&case, &y, &expected, two_products(&[K]));
        let scaling = layer.static_weight().unwrap().input_scaling();
        let right = match scaling {
            InputScaling::DynamicPerToken { .. } => strategy == "token",
            InputScaling::DynamicPerTensor { .. } => strategy == "tensor",
            InputScaling::DynamicPerGroup { size: got, .. } => strategy == "group" && *got == size,
            _ => false,
        };
        assert!(right, "{case}: {scaling:?}");
    }
    let dir = tempfile::tempdir().unwrap();
    file(dir.path(), &[N, 1], Some(0.02));
    let inputs = args("tensor", json!({}));
    write_config(
        dir.path(),
        &compressed("float-quantized", args("channel", json!({})), inputs),
    );
    let layer = layer(dir.path()).unwrap();
    assert!(matches!(
        layer.static_weight().unwrap().input_scaling(),
        InputScaling::Static(_)
    ));
    let x = cast_in_groups(&input(), K, |_| [1. / 0.02, 0.02]);
    let expected = product(&x, &weight(Granularity::Rowwise, N));
    assert_close(
        "static",
        &layer.forward(&input()).unwrap(),
        &expected,
        two_products(&[K]),
    );
}

#[test]
fn block_checkpoints_of_deepseek_and_qwen_run_in_groups_of_128() {
    let dir = tempfile::tempdir().unwrap();
    let (scale, codes) = (f32s(&scales(2)), codes(N * K));
    write(
        &dir.path().join("model.safetensors"),
        &[
            ("fc.weight", Dtype::F8_E4M3, &[N, K], &codes),
            ("fc.weight_scale_inv", Dtype::F32, &[1, 2], &scale),
        ],
    );
    write_config(
        dir.path(),
        &json!({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3",
            "activation_scheme": "dynamic", "weight_block_size": [128, 128]}}),
    );
    let layer = layer(dir.path()).unwrap();
    let weight = weight(
        Granularity::Blockwise {
            rows: 128,
            cols: 128,
        },
        2,
    );
    assert_same("the value", &layer.weight().unwrap(), &weight);
    let expected = product(&cast_in_groups(&input(), 128, dynamic_scales), &weight);
    assert_close(
        "groups",
        &layer.forward(&input()).unwrap(),
        &expected,
        two_products(&[K]),
    );
}

#[test]
fn the_scale_bytes_of_microscaled_checkpoints_are_powers_of_two() {
    let dir = tempfile::tempdir().unwrap();
    let codes = codes(N * K);
    let bytes: Vec<u8> = (0..N * K / 32).map(|i| 118 + (i % 7) as u8).collect();
    write(
        &dir.path().join("model.safetensors"),
        &[
            ("fc.weight", Dtype::F8_E4M3, &[N, K], &codes),
            ("fc.weight_scale", Dtype::U8, &[N, K / 32], &bytes),
        ],
    );
    let mx = json!({"group_size": 32, "scale_dtype": "torch.uint8"});
    let mut inputs = args("group", mx.clone());
    inputs["dynamic"] = json!(true);
    write_config(
        dir.path(),
        &compressed("mxfp8-quantized", args("group", mx), inputs),
    );
    let layer = layer(dir.path()).unwrap();
    let powers: Vec<f32> = bytes
        .iter()
        .flat_map(|byte| [2f32.powi(i32::from(*byte) - 127); 32])
        .collect();
    let decoded: Vec<f32> = codes
        .iter()
        .map(|code| Format::E4M3.decode(*code))
        .collect();
    let values: Vec<f32> = decoded.iter().zip(&powers).map(|(a, b)| a * b).collect();
    let weight = of(&values, &[N, K]);
    assert_same("the value", &layer.weight().unwrap(), &weight);
    let power = |amax: f32| {
        let power = (amax / 448.).log2().ceil().exp2();
        [1. / power, power]
    };
    let expected = product(&cast_in_groups(&input(), 32, power), &weight);
    assert_close(
        "mx",
        &layer.forward(&input()).unwrap(),
        &expected,
        two_products(&[K]),
    );
}

#[test]
fn the_most_specific_target_counts() {
    let dir = tempfile::tempdir().unwrap();
    file(dir.path(), &[N, 1], None);
    let group = |target: &str, strategy: &str| json!({"targets": [target], "weights": args(strategy, json!({})), "input_activations": null});
    let mut config = compressed("float-quantized", Value::Null, Value::Null);
    for (targets, fits) in [
        (["Linear", "re:fc", "fc"], true),
        (["fc", "re:fc", "Linear"], false),
        (["re:.*", "Linear", "fc"], true),
        (["Linear", "other", "re:^(?!other)f"], true),
    ] {
        // Only the strategy of the last group fits the file.
        config["quantization_config"]["config_groups"] = json!({
            "a": group(targets[0], "tensor"), "b": group(targets[1], "tensor"),
            "c": group(targets[2], "channel")});
        write_config(dir.path(), &config);
        assert_eq!(layer(dir.path()).is_ok(), fits, "{targets:?}");
    }
}
