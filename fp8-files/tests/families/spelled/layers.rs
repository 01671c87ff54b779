//! A layer of every family and scheme.

use super::*;

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
    // Name, configuration, tensors, and the expected family, inputs and values.
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
            FamilyName::AUTO_FP8,
            "Static",
            by_tensor(),
        ),
        (
            "AutoFP8 of Gaudi, channels",
            json!({"quant_method": "fp8", "activation_scheme": "dynamic"}),
            vec![fc(), rows(&[N, 1])],
            FamilyName::AUTO_FP8,
            TOKEN,
            by_row(),
        ),
        (
            "BF16 blocks of Qwen",
            fp8_blocks(json!({})),
            vec![fc(), bf16s("fc.weight_scale_inv", &[1, 2], &scales(2))],
            FamilyName::FP8_BLOCKS,
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
            FamilyName::FP8_BLOCKS,
            "DynamicPerGroup",
            by_f16,
        ),
        (
            "padded blocks",
            fp8_blocks(json!({})),
            vec![fc(), padded_rows(padded)],
            FamilyName::FP8_BLOCKS,
            "DynamicPerGroup",
            blocks(),
        ),
        (
            "DeepSeek V3.1",
            fp8_blocks(json!({"scale_fmt": "ue8m0"})),
            vec![fc(), floats("fc.weight_scale_inv", &[1, 2], &[0.5, 0.25])],
            FamilyName::FP8_BLOCKS,
            "DynamicPerGroup { size: 128, power_of_two: true }",
            expected(N, K, |_, col| [0.5, 0.25][col / 128]),
        ),
        (
            "DeepSeek V4",
            fp8_blocks(json!({"scale_fmt": "ue8m0"})),
            vec![fc(), block_bytes],
            FamilyName::FP8_BLOCKS,
            "DynamicPerGroup { size: 128, power_of_two: true }",
            by_block_bytes,
        ),
        (
            "MiniMax mxfp8",
            json!({"quant_method": "mxfp8", "weight_block_size": [1, 32]}),
            vec![fc(), mx("fc.weight_scale_inv", Dtype::U8)],
            FamilyName::FP8_BLOCKS,
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
            FamilyName::HF_PER_TENSOR,
            "Static",
            expected(N, K, |_, _| 0.0625),
        ),
        (
            "ModelOpt per channel",
            modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
            vec![fc(), rows(&[N])],
            FamilyName::MODEL_OPT,
            TOKEN,
            by_row(),
        ),
        (
            "ModelOpt blocks",
            modelopt("FP8_PB_WO"),
            vec![fc(), floats("fc.weight_scale", &[1, 1, 2, 1], &scales(2))],
            FamilyName::MODEL_OPT,
            "None",
            blocks(),
        ),
        (
            "ModelOpt blocks, other name",
            modelopt("fp8_pb_wo"),
            vec![fc(), floats("fc.weight_scale_inv", &[1, 2], &scales(2))],
            FamilyName::MODEL_OPT,
            "None",
            blocks(),
        ),
        (
            "ModelOpt mx",
            modelopt("MXFP8"),
            vec![fc(), mx("fc.weight_scale", Dtype::U8)],
            FamilyName::MODEL_OPT,
            "DynamicMx",
            by_power(),
        ),
        (
            "ModelOpt by its producer",
            json!({"producer": {"name": "modelopt"}, "quant_algo": "FP8"}),
            vec![fc(), one(), input("fc.input_scale")],
            FamilyName::MODEL_OPT,
            "Static",
            by_tensor(),
        ),
        (
            "ModelOpt mixed",
            json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
                "fc": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "other": {"quant_algo": "FP8"}}}),
            vec![fc(), rows(&[N]), floats("lm_head.weight", &[1, 1], &[1.])],
            FamilyName::MODEL_OPT,
            TOKEN,
            by_row(),
        ),
        (
            "FBGEMM",
            json!({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}),
            vec![fc(), rows(&[N, 1])],
            FamilyName::FBGEMM,
            "DynamicPerToken { power_of_two: false, amax_bound: Some(1200.0) }",
            by_row(),
        ),
        (
            "w8a8",
            json!({"quant_method": "w8a8_fp8"}),
            vec![fc(), rows(&[N, 1])],
            FamilyName::W8A8_FP8,
            TOKEN,
            by_row(),
        ),
        (
            "Quark static",
            quark("per_tensor", quark_input("per_tensor", false)),
            vec![fc(), one(), input("fc.input_scale")],
            FamilyName::QUARK,
            "Static",
            by_tensor(),
        ),
        (
            "Quark per channel",
            quark("per_channel", quark_input("per_token", true)),
            vec![fc(), rows(&[N])],
            FamilyName::QUARK,
            TOKEN,
            by_row(),
        ),
        (
            "Quark weight-only",
            quark("per_tensor", Value::Null),
            vec![fc(), one()],
            FamilyName::QUARK,
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
            FamilyName::COMPRESSED_TENSORS,
            TOKEN,
            by_row(),
        ),
        (
            "compressed-tensors, strategy by group size",
            compressed(json!({"group_size": -1}), Value::Null),
            vec![fc(), rows(&[N, 1])],
            FamilyName::COMPRESSED_TENSORS,
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
            FamilyName::W8A8_FP8,
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
        // Loaded by an FP8 layer and by a stock layer.
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

/// The first row of a grid as given, padded to four rows.
fn padded_rows(mut scale: Entry) -> Entry {
    let first = scales(2);
    let values: Vec<f32> = (0..16)
        .map(|at| if at < 2 { first[at] } else { 1. })
        .collect();
    scale.data = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    scale
}
