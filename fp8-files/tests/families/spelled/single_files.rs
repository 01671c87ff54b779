//! Families without a configuration beside the file: ComfyUI, plain casts, torchao.

use super::*;

/// Where cuBLAS expects the scale of row `r` and column `c`, with so many columns of tiles.
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
        check(
            case,
            &checkpoint,
            path,
            FamilyName::COMFY_UI,
            input,
            &values,
        );
        assert!(checkpoint.other_names().is_empty(), "{case}");
    }
    // Scales of microscaling are in tiles.
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
        FamilyName::COMFY_UI,
        "DynamicMx",
        &values,
    );
}

#[test]
fn plain_casts_open_on_request() {
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
        matches!(&error, fp8_files::Error::MissingScale { .. }),
        "{error:?}"
    );
    let options = OpenOptions::new().with_allow_unscaled(true);
    let checkpoint = model.open_with(options).unwrap();
    check(
        "plain",
        &checkpoint,
        "fc",
        FamilyName::PLAIN_CAST,
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

/// Only the scale of an FP8 tensor says that the codes are not the values.
#[test]
fn parameters_that_are_called_scales_are_no_scales_of_a_plain_cast() {
    let open = |more: &[Entry]| {
        let tensors = [&[weight("fc.weight", N, K)][..], more].concat();
        Model::new(None, &tensors).open_with(OpenOptions::new().with_allow_unscaled(true))
    };
    let values = expected(N, K, |_, _| 1.);
    for name in [
        "logit_scale",
        "text.logit_scale_inv",
        "block.0.layer_scale",
        "norm.scale",
        "rope_scales",
    ] {
        let checkpoint = open(&[floats(name, &[1], &[2.])]);
        let checkpoint = checkpoint.unwrap_or_else(|error| panic!("{name}: {error}"));
        let family = FamilyName::PLAIN_CAST;
        check(name, &checkpoint, "fc", family, "None", &values);
        assert_eq!(checkpoint.other_names(), [name]);
    }
    let table = || entry("table", Dtype::F8_E4M3, &[2, 2], vec![0x38; 4]);
    for more in [
        vec![
            weight("fd.weight", N, K),
            floats("fd.weight_scale", &[], &[1.]),
        ],
        vec![floats("fd.scale_weight", &[], &[1.])],
        vec![floats("fd.scales", &[1, 1], &[1.])],
        vec![floats("fd.input_scale", &[], &[1.])],
        vec![table(), floats("table_scale", &[1], &[1.])],
        vec![table(), floats("table_scale_inv", &[1], &[1.])],
    ] {
        let name = more[more.len() - 1].name.clone();
        let error = open(&more).unwrap_err();
        let is_typed = matches!(&error, fp8_files::Error::MissingScale { tensor, .. } if tensor == "fc.weight");
        assert!(is_typed, "{name}: {error}");
    }
}

#[test]
fn torchao_describes_its_tensors_in_metadata() {
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
        // With and without the configuration: the metadata are enough.
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
                FamilyName::TORCHAO,
                input,
                &values,
            );
        }
    }
}
