//! Families of which no library made a file for us: written here as their descriptions say, and their values computed by a
//! formula of their own.

use crate::support::*;
use candle_core::{DType, Device, Module, Tensor};
use fp8_recipes::load::{Checkpoint, FamilyName, OpenOptions};
use fp8_recipes::nn;
use half::{bf16, f16};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs;

const N: usize = 6;
const K: usize = 256;
const CPU: Device = Device::Cpu;

fn quantized(config: Value) -> Option<Value> {
    Some(json!({"model_type": "llama", "quantization_config": config}))
}

fn bf16s(name: &str, shape: &[usize], values: &[f32]) -> Entry {
    let data = values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes());
    entry(name, Dtype::BF16, shape, data.collect())
}

/// Exponents of powers of two, and their values.
fn powers(len: usize) -> (Vec<u8>, Vec<f32>) {
    let bytes: Vec<u8> = (0..len).map(|i| 110 + (i * 7 % 13) as u8).collect();
    let values = bytes.iter().map(|byte| 2f32.powi(i32::from(*byte) - 127));
    (bytes.clone(), values.collect())
}

/// Family, inputs and values of the layer `fc` or another of [N, K].
fn check(
    case: &str,
    checkpoint: &Checkpoint,
    path: &str,
    family: FamilyName,
    input: &str,
    values: &[f32],
) {
    assert_eq!(checkpoint.family(), family, "{case}");
    assert!(
        checkpoint.layer_paths().contains(&path.to_string()),
        "{case}"
    );
    let layer = checkpoint
        .stored_layer(path, &CPU)
        .unwrap_or_else(|error| panic!("{case}: {error}"));
    let text = format!("{:?}", layer.input);
    assert!(text.starts_with(input), "{case}: {text}");
    assert_eq!(value(checkpoint, path), values, "{case}");
}

fn opened(case: &str, model: &Model) -> Checkpoint {
    model
        .open()
        .unwrap_or_else(|error| panic!("{case}: {error}"))
}

const TOKEN: &str = "DynamicPerToken { power_of_two: false, amax_bound: None }";

#[test]
fn one_layer_of_each() {
    let one = || floats("fc.weight_scale", &[], &[0.02]);
    let rows = |shape: &[usize]| floats("fc.weight_scale", shape, &scales(N));
    let input = |name: &str| floats(name, &[], &[0.5]);
    let by_row = || expected(N, K, |row, _| scales(N)[row]);
    let by_tensor = || expected(N, K, |_, _| 0.02);
    let blocks = || expected(N, K, |_, col| scales(2)[col / 128]);
    let (bytes, power) = powers(N * K / 32);
    let by_power = || expected(N, K, |row, col| power[row * K / 32 + col / 32]);
    let fc = || weight("fc.weight", N, K);
    let mx = |name: &str, dtype| entry(name, dtype, &[N, K / 32], bytes.clone());
    let block_bytes = entry("fc.scale", Dtype::F8_E8M0, &[1, 2], vec![120, 117]);
    let by_block_bytes = expected(N, K, |_, col| [2f32.powi(-7), 2f32.powi(-10)][col / 128]);
    let rounded: Vec<f32> = scales(2)
        .iter()
        .map(|x| bf16::from_f32(*x).to_f32())
        .collect();
    let by_bf16 = expected(N, K, |_, col| rounded[col / 128]);
    let halves: Vec<f32> = scales(2)
        .iter()
        .map(|x| f16::from_f32(*x).to_f32())
        .collect();
    let by_f16 = expected(N, K, |_, col| halves[col / 128]);
    let f16_bytes: Vec<u8> = scales(2)
        .iter()
        .flat_map(|x| f16::from_f32(*x).to_le_bytes())
        .collect();
    let fp8_blocks = |more: Value| {
        let mut config = json!({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
            "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]});
        for (key, value) in more.as_object().unwrap() {
            config[key] = value.clone();
        }
        config
    };
    let padded = floats(
        "fc.weight_scale_inv",
        &[4, 4],
        &[&scales(2)[..], &[1.; 14]].concat(),
    );
    let modelopt =
        |algo: &str| json!({"quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head"]});
    let quark = |scheme: &str, inputs: Value| {
        json!({"quant_method": "quark", "exclude": ["lm_head", "*.gate"], "export": {"weight_format": "real_quantized"},
            "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": scheme, "ch_axis": 0,
                "is_dynamic": false, "symmetric": true}, "input_tensors": inputs}})
    };
    let quark_input = |scheme: &str, dynamic: bool| json!({"dtype": "fp8_e4m3", "qscheme": scheme, "is_dynamic": dynamic, "symmetric": true});
    let compressed = |weights: Value, inputs: Value| {
        let args = |more: &Value| {
            let mut args =
                json!({"num_bits": 8, "type": "float", "symmetric": null, "dynamic": false});
            for (key, value) in more.as_object().into_iter().flatten() {
                args[key] = value.clone();
            }
            if more.is_null() { Value::Null } else { args }
        };
        json!({"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
            "quantization_status": "frozen", "transform_config": {}, "sparsity_config": {},
            "kv_cache_scheme": args(&json!({"strategy": "attn_head"})),
            "config_groups": {"any": {"targets": ["Linear"], "weights": args(&weights), "input_activations": args(&inputs)},
                "kv": {"targets": ["LlamaAttention"], "weights": null, "input_activations": args(&json!({"strategy": "attn_head"}))}}})
    };
    let zero_point = || entry("fc.weight_zero_point", Dtype::F8_E4M3, &[N, 1], vec![0; N]);
    use FamilyName::*;
    // Name, configuration, tensors, and what comes of them.
    type Case = (
        &'static str,
        Value,
        Vec<Entry>,
        FamilyName,
        &'static str,
        Vec<f32>,
    );
    let cases: Vec<Case> = vec![
        (
            "AutoFP8 with act_scale",
            json!({"quant_method": "fp8", "activation_scheme": "static"}),
            vec![fc(), one(), input("fc.act_scale")],
            AutoFp8,
            "Static",
            by_tensor(),
        ),
        (
            "AutoFP8 of Gaudi, channels",
            json!({"quant_method": "fp8", "activation_scheme": "dynamic"}),
            vec![fc(), rows(&[N, 1])],
            AutoFp8,
            TOKEN,
            by_row(),
        ),
        (
            "BF16 blocks of Qwen",
            fp8_blocks(json!({})),
            vec![fc(), bf16s("fc.weight_scale_inv", &[1, 2], &scales(2))],
            Fp8Blocks,
            "DynamicPerGroup { size: 128, power_of_two: false }",
            by_bf16,
        ),
        (
            "F16 blocks",
            fp8_blocks(json!({})),
            vec![
                fc(),
                entry("fc.weight_scale_inv", Dtype::F16, &[1, 2], f16_bytes),
            ],
            Fp8Blocks,
            "DynamicPerGroup",
            by_f16,
        ),
        (
            "padded blocks",
            fp8_blocks(json!({})),
            vec![fc(), padded_rows(padded)],
            Fp8Blocks,
            "DynamicPerGroup",
            blocks(),
        ),
        (
            "DeepSeek V3.1",
            fp8_blocks(json!({"scale_fmt": "ue8m0"})),
            vec![fc(), floats("fc.weight_scale_inv", &[1, 2], &[0.5, 0.25])],
            Fp8Blocks,
            "DynamicPerGroup { size: 128, power_of_two: true }",
            expected(N, K, |_, col| [0.5, 0.25][col / 128]),
        ),
        (
            "DeepSeek V4",
            fp8_blocks(json!({"scale_fmt": "ue8m0"})),
            vec![fc(), block_bytes],
            Fp8Blocks,
            "DynamicPerGroup { size: 128, power_of_two: true }",
            by_block_bytes,
        ),
        (
            "MiniMax mxfp8",
            json!({"quant_method": "mxfp8", "weight_block_size": [1, 32]}),
            vec![fc(), mx("fc.weight_scale_inv", Dtype::U8)],
            Fp8Blocks,
            "DynamicMx",
            by_power(),
        ),
        (
            "Ministral for transformers",
            json!({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": null}),
            vec![
                fc(),
                bf16s("fc.weight_scale_inv", &[], &[0.0625]),
                bf16s("fc.activation_scale", &[], &[0.5]),
            ],
            HfPerTensor,
            "Static",
            expected(N, K, |_, _| 0.0625),
        ),
        (
            "ModelOpt per channel",
            modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
            vec![fc(), rows(&[N])],
            ModelOpt,
            TOKEN,
            by_row(),
        ),
        (
            "ModelOpt blocks",
            modelopt("FP8_PB_WO"),
            vec![fc(), floats("fc.weight_scale", &[1, 1, 2, 1], &scales(2))],
            ModelOpt,
            "None",
            blocks(),
        ),
        (
            "ModelOpt blocks, other name",
            modelopt("fp8_pb_wo"),
            vec![fc(), floats("fc.weight_scale_inv", &[1, 2], &scales(2))],
            ModelOpt,
            "None",
            blocks(),
        ),
        (
            "ModelOpt mx",
            modelopt("MXFP8"),
            vec![fc(), mx("fc.weight_scale", Dtype::U8)],
            ModelOpt,
            "DynamicMx",
            by_power(),
        ),
        (
            "ModelOpt by its producer",
            json!({"producer": {"name": "modelopt"}, "quant_algo": "FP8"}),
            vec![fc(), one(), input("fc.input_scale")],
            ModelOpt,
            "Static",
            by_tensor(),
        ),
        (
            "ModelOpt mixed",
            json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
                "fc": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "other": {"quant_algo": "FP8"}}}),
            vec![fc(), rows(&[N]), floats("lm_head.weight", &[1, 1], &[1.])],
            ModelOpt,
            TOKEN,
            by_row(),
        ),
        (
            "FBGEMM",
            json!({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}),
            vec![fc(), rows(&[N, 1])],
            Fbgemm,
            "DynamicPerToken { power_of_two: false, amax_bound: Some(1200.0) }",
            by_row(),
        ),
        (
            "w8a8",
            json!({"quant_method": "w8a8_fp8"}),
            vec![fc(), rows(&[N, 1])],
            W8a8Fp8,
            TOKEN,
            by_row(),
        ),
        (
            "Quark static",
            quark("per_tensor", quark_input("per_tensor", false)),
            vec![fc(), one(), input("fc.input_scale")],
            Quark,
            "Static",
            by_tensor(),
        ),
        (
            "Quark per channel",
            quark("per_channel", quark_input("per_token", true)),
            vec![fc(), rows(&[N])],
            Quark,
            TOKEN,
            by_row(),
        ),
        (
            "Quark weight-only",
            quark("per_tensor", Value::Null),
            vec![fc(), one()],
            Quark,
            "None",
            by_tensor(),
        ),
        (
            "compressed-tensors, old zero points",
            compressed(
                json!({"strategy": "channel"}),
                json!({"strategy": "token", "dynamic": true}),
            ),
            vec![
                fc(),
                rows(&[N, 1]),
                zero_point(),
                entry("fc.input_zero_point", Dtype::I8, &[1], vec![0]),
            ],
            CompressedTensors,
            TOKEN,
            by_row(),
        ),
        (
            "compressed-tensors, strategy by group size",
            compressed(json!({"group_size": -1}), Value::Null),
            vec![fc(), rows(&[N, 1])],
            CompressedTensors,
            "None",
            by_row(),
        ),
        (
            "state of Transformer Engine",
            json!({"quant_method": "w8a8_fp8"}),
            vec![
                fc(),
                rows(&[N, 1]),
                entry(
                    "fc._extra_state",
                    Dtype::U8,
                    &[9],
                    b"\x80\x04evil\x00\x01.".to_vec(),
                ),
            ],
            W8a8Fp8,
            TOKEN,
            by_row(),
        ),
    ];
    for (case, config, tensors, family, input, values) in cases {
        let model = Model::new(quantized(config), &tensors);
        let checkpoint = opened(case, &model);
        check(case, &checkpoint, "fc", family, input, &values);
        let others = checkpoint.other_names();
        assert!(
            others.iter().all(|name| name == "lm_head.weight"),
            "{case}: {others:?}"
        );
        // Asked for by a layer of ours, and by one that knows no FP8.
        let vb = checkpoint.var_builder(DType::F32, &CPU).unwrap();
        for weight in [
            nn::linear_no_bias(K, N, vb.pp("fc"))
                .unwrap()
                .weight()
                .unwrap(),
            candle_nn::linear_no_bias(K, N, vb.pp("fc"))
                .unwrap()
                .weight()
                .clone(),
        ] {
            assert_eq!(
                weight.flatten_all().unwrap().to_vec1::<f32>().unwrap(),
                values,
                "{case}"
            );
        }
    }
}

/// A grid of four rows and columns whose first row is right.
fn padded_rows(mut scale: Entry) -> Entry {
    let first = scales(2);
    let values: Vec<f32> = (0..16)
        .map(|at| if at < 2 { first[at] } else { 1. })
        .collect();
    scale.data = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    scale
}

#[test]
fn the_bound_of_fbgemm_is_one_of_the_amax() {
    let config = quantized(json!({"quant_method": "fbgemm_fp8", "activation_scale_ub": 12.0}));
    let model = Model::new(
        config,
        &[
            weight("fc.weight", N, K),
            floats("fc.weight_scale", &[N, 1], &scales(N)),
        ],
    );
    let vb = model.open().unwrap().var_builder(DType::F32, &CPU).unwrap();
    let layer = nn::linear_no_bias(K, N, vb.pp("fc")).unwrap();
    // The second row goes beyond the bound, where it saturates at 12.
    let x: Vec<f32> = (0..2 * K)
        .map(|i| ((i * 7919 % 401) as f32 / 200. - 1.) * if i < K { 3. } else { 40. })
        .collect();
    let weights = expected(N, K, |row, _| scales(N)[row]);
    let y = layer
        .forward(&Tensor::from_vec(x.clone(), (2, K), &CPU).unwrap())
        .unwrap()
        .to_vec2::<f32>()
        .unwrap();
    for (row, x) in x.chunks(K).enumerate() {
        let amax = x.iter().fold(0f32, |a, x| a.max(x.abs())).min(12.);
        let cast = fp8_core::Cast::new(fp8_core::Format::E4M3);
        let scale = amax / 448.;
        let x: Vec<f32> = x
            .iter()
            .map(|x| decode(cast.encode(x * (448. / amax), 0)) * scale)
            .collect();
        for (n, y) in y[row].iter().enumerate() {
            let sum: f64 = (0..K)
                .map(|k| f64::from(x[k]) * f64::from(weights[n * K + k]))
                .sum();
            let size: f64 = (0..K)
                .map(|k| (f64::from(x[k]) * f64::from(weights[n * K + k])).abs())
                .sum();
            assert!(
                (f64::from(*y) - sum).abs() < 1e-5 * size,
                "{row} {n}: {y} {sum}"
            );
        }
    }
}

#[test]
fn a_block_of_zeros_may_have_a_scale_of_zero() {
    let config = || {
        quantized(
            json!({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}),
        )
    };
    let mut fc = weight("fc.weight", N, K);
    let scale = floats("fc.weight_scale_inv", &[1, 2], &[0.5, 0.]);
    let error = Model::new(config(), &[fc.clone(), scale.clone()])
        .open()
        .unwrap()
        .stored_layer("fc", &CPU)
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("`fc.weight_scale_inv` holds 0e0 at index 1"),
        "{error}"
    );
    for (at, code) in fc.data.iter_mut().enumerate() {
        if at % K >= 128 {
            *code &= 0x80;
        }
    }
    let model = Model::new(config(), &[fc, scale]);
    let values = value(&model.open().unwrap(), "fc");
    assert!(
        values
            .iter()
            .enumerate()
            .all(|(at, value)| (at % K < 128) || *value == 0.)
    );
    assert!(values.iter().all(|value| value.is_finite()));
}

#[test]
fn ragged_blocks_keep_the_size_of_the_configuration() {
    // 192 rows in blocks of 128: dividing rows by scales would give 96.
    let (n, k) = (192, 160);
    let config = quantized(
        json!({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}),
    );
    let model = Model::new(
        config,
        &[
            weight("fc.weight", n, k),
            floats("fc.weight_scale_inv", &[2, 2], &scales(4)),
        ],
    );
    let values = expected(n, k, |row, col| scales(4)[row / 128 * 2 + col / 128]);
    assert_eq!(value(&model.open().unwrap(), "fc"), values);
}

#[test]
fn a_weight_of_one_block_may_have_a_number() {
    let config = json!({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "fp8_pb_wo", "kv_cache_quant_algo": null,
        "exclude_modules": ["lm_head", "vision*"]}});
    let model = Model::new(
        Some(json!({"model_type": "llama"})),
        &[
            weight("fc.weight", N, 128),
            floats("fc.weight_scale", &[], &[0.25]),
            floats("vision.fc.weight", &[1, 1], &[1.]),
        ],
    );
    model.file("hf_quant_config.json", &config.to_string());
    let checkpoint = model.open().unwrap();
    let values = expected(N, 128, |_, _| 0.25);
    check(
        "one block",
        &checkpoint,
        "fc",
        FamilyName::ModelOpt,
        "None",
        &values,
    );
}

#[test]
fn words_of_mlx_hold_four_codes() {
    let config = json!({"group_size": 32, "bits": 8, "mode": "mxfp8", "head": false});
    let config = Some(json!({"quantization": config.clone(), "quantization_config": config}));
    let (bytes, power) = powers(N * K / 32);
    let words: Vec<u32> = codes(N * K)
        .chunks(4)
        .map(|c| {
            u32::from(c[0]) | u32::from(c[1]) << 8 | u32::from(c[2]) << 16 | u32::from(c[3]) << 24
        })
        .collect();
    let words = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let model = Model::new(
        config,
        &[
            entry("fc.weight", Dtype::U32, &[N, K / 4], words),
            entry("fc.scales", Dtype::U8, &[N, K / 32], bytes),
            floats("head.weight", &[1, 1], &[1.]),
        ],
    );
    let checkpoint = model.open().unwrap();
    assert_eq!(checkpoint.shape("fc.weight"), Some(&[N, K][..]));
    assert_eq!(checkpoint.dtype("fc.weight"), Some(Dtype::F8_E4M3));
    assert_eq!(checkpoint.other_names(), ["head.weight"]);
    let values = expected(N, K, |row, col| power[row * K / 32 + col / 32]);
    check("mlx", &checkpoint, "fc", FamilyName::Mlx, "None", &values);
}

/// Where cuBLAS wants the element of row r and column c of scales with so many columns of tiles.
fn swizzled(r: usize, c: usize, tiles: usize) -> usize {
    let (tile, r, c) = ((r / 128) * tiles + c / 4, r % 128, c % 4);
    tile * 512 + (r % 32) * 16 + (r / 32) * 4 + c
}

#[test]
fn models_of_comfyui() {
    let new = |layers: Value| {
        let text = json!({"format_version": "1.0", "layers": layers}).to_string();
        Some(HashMap::from([(
            "_quantization_metadata".to_string(),
            text,
        )]))
    };
    let path = "model.diffusion_model.block.fc";
    let name = |own: &str| format!("{path}.{own}");
    let fc = || weight(&name("weight"), N, K);
    let marker = |len: usize| floats("model.diffusion_model.scaled_fp8", &[len], &vec![0.; len]);
    let scale = |own: &str| floats(&name(own), &[1], &[0.02]);
    let by_tensor = || expected(N, K, |_, _| 0.02);
    let described = json!({"format": "float8_e4m3fn"});
    let full = json!({"format": "float8_e4m3fn", "full_precision_matrix_mult": true});
    let bytes = |value: &Value| {
        let data = value.to_string().into_bytes();
        entry(&name("comfy_quant"), Dtype::U8, &[data.len()], data)
    };
    let cases = vec![
        (
            "old",
            None,
            vec![fc(), scale("scale_weight"), marker(0)],
            "None",
            by_tensor(),
        ),
        (
            "old, inputs",
            None,
            vec![fc(), scale("scale_weight"), scale("scale_input"), marker(0)],
            "Static",
            by_tensor(),
        ),
        (
            "old, inputs of 1",
            None,
            vec![
                fc(),
                scale("scale_weight"),
                floats(&name("scale_input"), &[], &[1.]),
                marker(0),
            ],
            "None",
            by_tensor(),
        ),
        (
            "old, full precision",
            None,
            vec![fc(), scale("scale_weight"), scale("scale_input"), marker(2)],
            "None",
            by_tensor(),
        ),
        (
            "old, rows",
            None,
            vec![fc(), floats(&name("scale_weight"), &[N, 1], &scales(N))],
            "None",
            expected(N, K, |row, _| scales(N)[row]),
        ),
        (
            "old, blocks",
            None,
            vec![
                fc(),
                floats(&name("scale_weight"), &[N, 4, 1], &scales(4 * N)),
            ],
            "None",
            expected(N, K, |row, col| scales(4 * N)[row * 4 + col / 64]),
        ),
        (
            "new",
            new(json!({path: described})),
            vec![fc(), scale("weight_scale"), scale("input_scale")],
            "Static",
            by_tensor(),
        ),
        (
            "new, short path",
            new(json!({"block.fc": full})),
            vec![fc(), scale("weight_scale"), scale("input_scale")],
            "None",
            by_tensor(),
        ),
        (
            "new, tensors",
            None,
            vec![fc(), scale("weight_scale"), bytes(&described)],
            "None",
            by_tensor(),
        ),
    ];
    for (case, metadata, tensors, input, values) in cases {
        let model = Model::with(None, &tensors, metadata);
        let checkpoint = opened(case, &model);
        check(case, &checkpoint, path, FamilyName::ComfyUi, input, &values);
        assert!(checkpoint.other_names().is_empty(), "{case}");
    }
    // Scales of microscaling stand in tiles.
    let (n, k) = (160, 192);
    let (exponents, power) = powers(n * k / 32);
    let (rows, cols) = (256, 8);
    let mut tiles = vec![0u8; rows * cols];
    for r in 0..n {
        for c in 0..k / 32 {
            tiles[swizzled(r, c, cols / 4)] = exponents[r * (k / 32) + c];
        }
    }
    let tensors = [
        weight(&name("weight"), n, k),
        entry(&name("weight_scale"), Dtype::F8_E8M0, &[rows, cols], tiles),
    ];
    let model = Model::with(None, &tensors, new(json!({path: {"format": "mxfp8"}})));
    let values = expected(n, k, |row, col| power[row * (k / 32) + col / 32]);
    check(
        "mxfp8",
        &model.open().unwrap(),
        path,
        FamilyName::ComfyUi,
        "DynamicMx",
        &values,
    );
}

#[test]
fn plain_casts_open_if_asked_for() {
    let e5m2 = entry(
        "conv.weight",
        Dtype::F8_E5M2,
        &[2, 1, 1, 1],
        vec![0x3C, 0xC1],
    );
    let model = Model::new(
        None,
        &[
            weight("fc.weight", N, K),
            e5m2,
            entry("norm.scale", Dtype::F8_E4M3, &[2], vec![0x38, 0x40]),
            floats("fc.bias", &[N], &[0.; N]),
        ],
    );
    let error = model.open().unwrap_err();
    assert!(
        matches!(&error, fp8_recipes::Error::MissingScale { .. }),
        "{error:?}"
    );
    let options = OpenOptions::new().with_allow_unscaled(true);
    let checkpoint = model.open_with(options).unwrap();
    check(
        "plain",
        &checkpoint,
        "fc",
        FamilyName::PlainCast,
        "None",
        &expected(N, K, |_, _| 1.),
    );
    assert_eq!(
        checkpoint.other_names(),
        ["conv.weight", "fc.bias", "norm.scale"]
    );
    let vb = checkpoint.var_builder(DType::F32, &CPU).unwrap();
    let conv = vb.get((2, 1, 1, 1), "conv.weight").unwrap();
    assert_eq!(
        conv.flatten_all().unwrap().to_vec1::<f32>().unwrap(),
        [1., -2.5]
    );
    assert_eq!(
        vb.get(2, "norm.scale").unwrap().to_vec1::<f32>().unwrap(),
        [1., 2.]
    );
}

#[test]
fn torchao_describes_its_tensors_itself() {
    let describe = |of_type: &str, data: Value| {
        let tensor =
            json!({"_type": of_type, "_data": data, "_tensor_data_names": ["qdata", "scale"]});
        Some(HashMap::from([
            ("tensor_names".to_string(), json!(["fc.weight"]).to_string()),
            ("fc.weight".to_string(), tensor.to_string()),
        ]))
    };
    let inputs = |granularity: Value, bound: Value| {
        json!({"_type": "QuantizeTensorToFloat8Kwargs", "_data": {"granularity": granularity, "hp_value_lb": null, "hp_value_ub": bound,
            "float8_dtype": {"_type": "torch.dtype", "_data": "float8_e4m3fn"}}})
    };
    let row = json!({"_type": "PerRow", "_data": {"dim": -1}});
    let block = json!({"_type": "PerBlock", "_data": {"block_size": [1, 128]}});
    let qdata = || weight("fc._weight_qdata", N, K);
    let rows = || floats("fc._weight_scale", &[N, 1], &scales(N));
    let (bytes, power) = powers(N * K / 32);
    let by_row = || expected(N, K, |row, _| scales(N)[row]);
    let cases = [
        (
            "weight-only",
            describe(
                "Float8Tensor",
                json!({"block_size": [1, K], "act_quant_kwargs": null}),
            ),
            vec![qdata(), rows()],
            "None",
            by_row(),
        ),
        (
            "bounded",
            describe(
                "Float8Tensor",
                json!({"block_size": [1, K], "act_quant_kwargs": inputs(row, json!(600.0))}),
            ),
            vec![qdata(), rows()],
            "DynamicPerToken { power_of_two: false, amax_bound: Some(600.0) }",
            by_row(),
        ),
        (
            "blocks",
            describe(
                "Float8Tensor",
                json!({"block_size": [128, 128], "act_quant_kwargs": inputs(block, Value::Null)}),
            ),
            vec![qdata(), floats("fc._weight_scale", &[1, 2], &scales(2))],
            "DynamicPerGroup { size: 128, power_of_two: false }",
            expected(N, K, |_, col| scales(2)[col / 128]),
        ),
        (
            "mx",
            describe(
                "MXTensor",
                json!({"block_size": 32, "elem_dtype": {"_data": "float8_e4m3fn"}, "act_quant_kwargs": {}}),
            ),
            vec![
                qdata(),
                entry("fc._weight_scale", Dtype::F8_E8M0, &[N, K / 32], bytes),
            ],
            "DynamicMx",
            expected(N, K, |row, col| power[row * K / 32 + col / 32]),
        ),
    ];
    for (case, metadata, tensors, input, values) in cases {
        // With and without the configuration: the metadata say it all.
        for config in [
            None,
            quantized(
                json!({"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}}}),
            ),
        ] {
            let model = Model::with(config, &tensors, metadata.clone());
            check(
                case,
                &opened(case, &model),
                "fc",
                FamilyName::Torchao,
                input,
                &values,
            );
        }
    }
}

#[test]
fn mistrals_own_files_get_the_names_and_rows_of_transformers() {
    let (heads, kv_heads, head, k) = (4, 2, 8, 32);
    let sizes = [
        ("wq", heads * head),
        ("wk", kv_heads * head),
        ("wv", kv_heads * head),
    ];
    for (per_row, dynamic) in [(false, false), (true, false), (false, true)] {
        let mut tensors = vec![
            bf16s("tok_embeddings.weight", &[3, k], &scales(3 * k)),
            floats("layers.0.attention_norm.weight", &[k], &scales(k)),
            floats("norm.weight", &[k], &scales(k)),
            floats("output.weight", &[3, k], &scales(3 * k)),
            floats(
                "layers.0.attention.kv_fake_quantizer.qscale_act",
                &[],
                &[0.75],
            ),
            weight("layers.0.feed_forward.w2.weight", k, 64),
            floats("layers.0.feed_forward.w2.qscale_weight", &[], &[0.5]),
        ];
        if !dynamic {
            tensors.push(floats("layers.0.feed_forward.w2.qscale_act", &[], &[0.5]));
        }
        for (own, rows) in sizes {
            let name = |end: &str| format!("layers.0.attention.{own}.{end}");
            tensors.push(weight(&name("weight"), rows, k));
            tensors.push(match per_row {
                true => floats(&name("qscale_weight"), &[rows], &scales(rows)),
                false => floats(&name("qscale_weight"), &[], &[0.02]),
            });
            if !dynamic {
                tensors.push(floats(&name("qscale_act"), &[], &[0.5]));
            }
        }
        let quantization = match dynamic {
            true => json!({"qformat_weight": "fp8_e4m3", "qscheme_act": "NO_SCALES"}),
            false => json!({"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}),
        };
        let params = json!({"dim": k, "n_heads": heads, "n_kv_heads": kv_heads, "head_dim": head, "quantization": quantization});
        for in_two in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join("params.json"), params.to_string()).unwrap();
            match in_two {
                true => split(
                    dir.path(),
                    &tensors,
                    HashMap::new(),
                    "consolidated.safetensors",
                ),
                false => write(&dir.path().join("consolidated.safetensors"), &tensors, None),
            }
            let checkpoint = Checkpoint::open_dir(dir.path()).unwrap();
            let input = if dynamic { TOKEN } else { "Static" };
            for (own, rows) in sizes {
                let native = expected(
                    rows,
                    k,
                    |row, _| if per_row { scales(rows)[row] } else { 0.02 },
                );
                // view(heads, head / 2, 2, k).transpose(1, 2).reshape(rows, k)
                let mut values = native.clone();
                if own != "wv" {
                    for h in 0..rows / head {
                        for i in 0..head / 2 {
                            for j in 0..2 {
                                let (to, from) =
                                    (h * head + j * head / 2 + i, h * head + i * 2 + j);
                                values[to * k..][..k].copy_from_slice(&native[from * k..][..k]);
                            }
                        }
                    }
                }
                let path = format!("model.layers.0.self_attn.{}_proj", &own[1..]);
                check(
                    own,
                    &checkpoint,
                    &path,
                    FamilyName::MistralNative,
                    input,
                    &values,
                );
                // The codes of a layer of ours have the same rows.
                let vb = Checkpoint::open_dir(dir.path())
                    .unwrap()
                    .var_builder(DType::F32, &CPU)
                    .unwrap();
                let layer = nn::linear_no_bias(k, rows, vb.pp(&path)).unwrap();
                assert_eq!(
                    layer
                        .weight()
                        .unwrap()
                        .flatten_all()
                        .unwrap()
                        .to_vec1::<f32>()
                        .unwrap(),
                    values
                );
            }
            assert_eq!(
                value(&checkpoint, "model.layers.0.mlp.down_proj"),
                expected(k, 64, |_, _| 0.5)
            );
            let others = [
                "lm_head.weight",
                "model.embed_tokens.weight",
                "model.layers.0.input_layernorm.weight",
                "model.layers.0.self_attn.k_scale",
                "model.layers.0.self_attn.v_scale",
                "model.norm.weight",
            ];
            assert_eq!(checkpoint.other_names(), others);
            assert_eq!(
                bits(
                    &checkpoint
                        .tensor("model.layers.0.self_attn.v_scale", &CPU)
                        .unwrap()
                ),
                [0.75f32.to_bits()]
            );
            assert!(checkpoint.config().is_none());
        }
    }
}

#[test]
fn scales_of_caches_have_one_name() {
    let attention = "model.layers.0.self_attn";
    let (k, v) = (
        format!("{attention}.k_scale"),
        format!("{attention}.v_scale"),
    );
    let cases: [(&[&str], &[usize]); 7] = [
        (&["k_scale", "v_scale"], &[1]),
        (&["k_scale", "v_scale"], &[3, 1, 1]),
        (&["k_proj.output_scale", "v_proj.output_scale"], &[]),
        (&["k_proj.k_scale", "v_proj.v_scale"], &[]),
        (&["qkv_proj.k_scale", "qkv_proj.v_scale"], &[1]),
        (&["k_cache.scale", "v_cache.scale"], &[]),
        (&["kv_scale"], &[]),
    ];
    for (spellings, shape) in cases {
        let config = quantized(json!({"quant_method": "fp8", "activation_scheme": "dynamic"}));
        let mut tensors = vec![
            weight("fc.weight", N, K),
            floats("fc.weight_scale", &[], &[0.02]),
        ];
        let len = shape.iter().product::<usize>();
        for own in spellings {
            tensors.push(bf16s(&format!("{attention}.{own}"), shape, &vec![1.5; len]));
        }
        let checkpoint = Model::new(config, &tensors).open().unwrap();
        assert_eq!(checkpoint.other_names(), [k.as_str(), &v], "{spellings:?}");
        for name in [&k, &v] {
            assert_eq!(checkpoint.shape(name), Some(&[len][..]));
            let scale = checkpoint.tensor(name, &CPU).unwrap();
            assert_eq!(scale.to_vec1::<f32>().unwrap(), vec![1.5; len]);
        }
        let vb = checkpoint.var_builder(DType::F32, &CPU).unwrap();
        assert!(vb.contains_tensor(&k) && vb.get(len, &v).is_ok());
    }
}

#[test]
fn an_index_decides_between_files() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (
        dir.path().join("a.safetensors"),
        dir.path().join("b.safetensors"),
    );
    write(
        &a,
        &[floats("x", &[1], &[1.]), floats("y", &[1], &[2.])],
        None,
    );
    write(&b, &[floats("x", &[1], &[3.])], None);
    let index = json!({"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}});
    fs::write(
        dir.path().join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
    let checkpoint = Checkpoint::open_dir(dir.path()).unwrap();
    assert_eq!(checkpoint.family(), FamilyName::HighPrecision);
    assert_eq!(
        checkpoint
            .tensor("x", &CPU)
            .unwrap()
            .to_vec1::<f32>()
            .unwrap(),
        [3.]
    );
    assert_eq!(
        checkpoint
            .tensor("y", &CPU)
            .unwrap()
            .to_vec1::<f32>()
            .unwrap(),
        [2.]
    );
}

/// Scales go with the rows they belong to, and a block of rows that would be torn apart is refused.
#[test]
fn scales_along_rows_follow_the_rows_of_mistral() {
    let (heads, head, k) = (4, 8, 64);
    let rows = heads * head;
    let open = |format: &str, args: Value, scale: Entry| {
        let params = json!({"n_heads": heads, "quantization": {"quant_method": "compressed-tensors", "format": format,
            "config_groups": {"g": {"targets": ["Linear"], "weights": args}}}});
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("params.json"), params.to_string()).unwrap();
        let tensors = [
            weight("layers.0.attention.wq.weight", rows, k),
            floats("tok_embeddings.weight", &[1], &[1.]),
            scale,
        ];
        write(&dir.path().join("consolidated.safetensors"), &tensors, None);
        (Checkpoint::open_dir(dir.path()), dir)
    };
    let permuted = |native: Vec<f32>| {
        let from =
            |row: usize| row / head * head + row % head % (head / 2) * 2 + row % head / (head / 2);
        let row = |row: usize| native[from(row) * k..][..k].to_vec();
        (0..rows).flat_map(row).collect::<Vec<f32>>()
    };
    const PATH: &str = "model.layers.0.self_attn.q_proj";
    const SCALE: &str = "layers.0.attention.wq.weight_scale";

    let (bytes, numbers) = powers(rows * 2);
    let args = json!({"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"});
    let scale = entry(SCALE, Dtype::U8, &[rows, 2], bytes);
    let (checkpoint, _dir) = open("mxfp8-quantized", args, scale);
    let checkpoint = checkpoint.unwrap();
    let native = expected(rows, k, |row, col| numbers[row * 2 + col / 32]);
    assert_eq!(value(&checkpoint, PATH), permuted(native));

    // One row, one head, two heads, more rows than there are.
    for high in [1, head, 2 * head, 4 * rows] {
        let grid = rows.div_ceil(high);
        let args = json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [high, 32]});
        let scale = floats(SCALE, &[grid, 2], &scales(grid * 2));
        let (checkpoint, _dir) = open("float-quantized", args, scale);
        let checkpoint = checkpoint.unwrap();
        let native = expected(rows, k, |row, col| {
            scales(grid * 2)[row / high * 2 + col / 32]
        });
        assert_eq!(value(&checkpoint, PATH), permuted(native), "{high}");
    }
    for high in [2, head / 2, head + 4] {
        let grid = rows.div_ceil(high);
        let args = json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [high, 32]});
        let scale = floats(SCALE, &[grid, 2], &scales(grid * 2));
        let error = open("float-quantized", args, scale).0.unwrap_err();
        assert!(
            matches!(error, fp8_recipes::Error::TensorShape { .. }),
            "{error}"
        );
        let text = error.to_string();
        assert!(
            text.contains(SCALE) && text.contains("heads of 8 rows"),
            "{text}"
        );
    }
}

/// Scales that are made of the inputs are powers of two where the configuration gives them that type.
#[test]
fn scales_of_quarks_inputs_have_the_type_that_is_told() {
    let args = |more: Value| {
        let mut args = json!({"dtype": "fp8_e4m3", "symmetric": true});
        for (key, value) in more.as_object().unwrap() {
            args[key] = value.clone();
        }
        args
    };
    for (scheme, input) in [
        ("per_token", "DynamicPerToken"),
        ("per_tensor", "DynamicPerTensor"),
        ("per_group", "DynamicPerGroup"),
    ] {
        for (scale_type, powers) in [("float8_e8m0fnu", true), ("float32", false)] {
            let inputs = args(
                json!({"qscheme": scheme, "is_dynamic": true, "group_size": 128, "scale_type": scale_type}),
            );
            let config = json!({"quant_method": "quark", "global_quant_config": {
                "weight": args(json!({"qscheme": "per_tensor"})), "input_tensors": inputs}});
            let tensors = [
                weight("fc.weight", N, K),
                floats("fc.weight_scale", &[], &[0.02]),
            ];
            let model = Model::new(quantized(config), &tensors);
            let layer = opened(scheme, &model).stored_layer("fc", &CPU).unwrap();
            let text = format!("{:?}", layer.input);
            assert!(text.starts_with(input), "{text}");
            assert!(text.contains(&format!("power_of_two: {powers}")), "{text}");
        }
    }
}
