//! Scales of blocks and groups, bounds of amaxes, packed words.

use super::*;

#[test]
fn the_bound_of_fbgemm_limits_the_amax() {
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
    // The second row exceeds the bound and saturates at 12.
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
fn the_scale_of_one_block_may_be_a_number() {
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
        FamilyName::MODEL_OPT,
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
    check("mlx", &checkpoint, "fc", FamilyName::MLX, "None", &values);
}

/// Scales computed from inputs are powers of two if the configuration gives them that type.
#[test]
fn quark_declares_the_type_of_input_scales() {
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

/// Blocks and groups with exponents, and entries for classes of layers.
#[test]
fn quark_declares_blocks_groups_and_classes() {
    let args = |more: Value| {
        let mut args = json!({"dtype": "fp8_e4m3", "symmetric": true, "is_dynamic": false});
        for (key, value) in more.as_object().unwrap() {
            args[key] = value.clone();
        }
        json!({"weight": args, "input_tensors": null})
    };
    let e8m0 = "float8_e8m0fnu";
    let (bytes, power) = powers(N * K / 32);
    let scale = |dtype, shape: &[usize], bytes| entry("fc.weight_scale", dtype, shape, bytes);
    for (case, config, scale, values) in [
        (
            "per_block",
            json!({"global_quant_config": args(json!({"qscheme": "per_block", "block_size": [128, 128], "scale_type": e8m0}))}),
            scale(Dtype::F8_E8M0, &[1, 2], vec![120, 117]),
            expected(N, K, |_, col| [2f32.powi(-7), 2f32.powi(-10)][col / 128]),
        ),
        (
            "per_group",
            json!({"global_quant_config": args(json!({"qscheme": "per_group", "group_size": 32, "scale_format": e8m0}))}),
            scale(Dtype::U8, &[N, K / 32], bytes),
            expected(N, K, |row, col| power[row * K / 32 + col / 32]),
        ),
        (
            "of a class",
            json!({"global_quant_config": args(json!({"qscheme": "per_tensor"})),
                "layer_type_quant_config": {"nn.Linear": args(json!({"qscheme": "per_channel", "ch_axis": 0})),
                    "nn.Conv2d": args(json!({"qscheme": "per_tensor"}))}}),
            floats("fc.weight_scale", &[N], &scales(N)),
            expected(N, K, |row, _| scales(N)[row]),
        ),
    ] {
        let mut config = config;
        config["quant_method"] = json!("quark");
        let model = Model::new(quantized(config), &[weight("fc.weight", N, K), scale]);
        let checkpoint = opened(case, &model);
        check(case, &checkpoint, "fc", FamilyName::QUARK, "None", &values);
    }
}
