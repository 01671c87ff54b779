//! Descriptions that do not fit their tensors.

use super::*;

#[test]
fn descriptions_that_do_not_fit_their_tensors() {
    let torchao = |data: Value, of_type: &str| {
        let text = json!({"_type": of_type, "_data": data}).to_string();
        Some(HashMap::from([
            ("tensor_names".into(), "[\"fc.weight\"]".into()),
            ("fc.weight".into(), text),
        ]))
    };
    let comfy = |layers: Value| {
        Some(HashMap::from([(
            "_quantization_metadata".into(),
            json!({"layers": layers}).to_string(),
        )]))
    };
    let with = |name, metadata, tensors, parts| Case {
        metadata,
        ..case(name, None, tensors, parts)
    };
    let qdata = || {
        vec![
            weight("fc._weight_qdata", N, K),
            floats("fc._weight_scale", &[N, 1], &scales(N)),
        ]
    };
    let rows = || json!({"block_size": [1, K], "act_quant_kwargs": null});
    let inputs = |more: Value| {
        let mut data = json!({"granularity": {"_type": "PerRow", "_data": {}}});
        for (key, value) in more.as_object().unwrap() {
            data[key] = value.clone();
        }
        json!({"block_size": [1, K], "act_quant_kwargs": {"_data": data}})
    };
    let broken = HashMap::from([
        ("tensor_names".to_string(), "[]".to_string()),
        ("fc.weight".to_string(), "{nope".to_string()),
    ]);
    run(vec![
        with(
            "integers of torchao",
            torchao(rows(), "Int4Tensor"),
            qdata(),
            &["fc.weight._type", "Int4Tensor"],
        ),
        with(
            "no codes",
            torchao(rows(), "Float8Tensor"),
            vec![plain("x")],
            &["`fc._weight_qdata`", "fc.weight"],
        ),
        with(
            "codes that are not described",
            torchao(rows(), "Tensor"),
            qdata(),
            &["`fc`", "`fc._weight_qdata`"],
        ),
        with(
            "no scale of torchao",
            torchao(rows(), "Float8Tensor"),
            vec![weight("fc._weight_qdata", N, K)],
            &["`fc._weight_qdata`", "weight_scale"],
        ),
        with(
            "another granularity",
            torchao(json!({"block_size": [N, K]}), "Float8Tensor"),
            qdata(),
            &["`fc._weight_scale`", "[6, 1]", "[1]"],
        ),
        with(
            "no blocks",
            torchao(json!({"block_size": [1]}), "Float8Tensor"),
            qdata(),
            &["block_size", "[1]"],
        ),
        with(
            "a lower bound",
            torchao(inputs(json!({"hp_value_lb": 1.0})), "Float8Tensor"),
            qdata(),
            &["hp_value_lb", "1.0"],
        ),
        with(
            "inputs in E5M2",
            torchao(
                inputs(json!({"float8_dtype": "float8_e5m2"})),
                "Float8Tensor",
            ),
            qdata(),
            &["float8_dtype", "float8_e5m2"],
        ),
        with(
            "inputs of another kind",
            torchao(
                inputs(json!({"granularity": {"_type": "PerAxis"}})),
                "Float8Tensor",
            ),
            qdata(),
            &["granularity", "PerAxis"],
        ),
        with(
            "broken description",
            Some(broken),
            qdata(),
            &["`fc.weight`", "not valid"],
        ),
        case(
            "torchao without metadata",
            quantized(json!({"quant_method": "torchao"})),
            qdata(),
            &["tensor_names"],
        ),
        case(
            "torchao of integers",
            quantized(
                json!({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}),
            ),
            qdata(),
            &["quant_type.default._type", "Int4WeightOnlyConfig"],
        ),
        with(
            "NVFP4 of ComfyUI",
            comfy(json!({"fc": {"format": "nvfp4"}})),
            vec![fc(), one()],
            &["layers.fc.format", "nvfp4"],
        ),
        with(
            "E5M2 of ComfyUI",
            comfy(json!({"fc": {"format": "float8_e5m2"}})),
            vec![fc(), one()],
            &["layers.fc.format", "float8_e5m2"],
        ),
        with(
            "a layer that is not described",
            comfy(json!({"fd": {"format": "float8_e4m3fn"}})),
            vec![fc(), one()],
            &["`fc`", "high precision"],
        ),
        with(
            "both names",
            comfy(json!({"fc": {"format": "float8_e4m3fn"}})),
            vec![fc(), one(), floats("fc.scale_weight", &[], &[1.])],
            &["`fc.scale_weight`", "`fc.weight_scale`"],
        ),
        with(
            "tiles of another size",
            comfy(json!({"fc": {"format": "mxfp8"}})),
            vec![
                fc(),
                entry(
                    "fc.weight_scale",
                    Dtype::U8,
                    &[N, K / 32],
                    vec![120; N * K / 32],
                ),
            ],
            &["`fc.weight_scale`", "[6, 8]"],
        ),
        case(
            "marker of E5M2",
            None,
            vec![
                fc(),
                floats("fc.scale_weight", &[], &[1.]),
                entry("scaled_fp8", Dtype::F8_E5M2, &[0], vec![]),
            ],
            &["`scaled_fp8`", "F8_E5M2"],
        ),
        case(
            "broken description of a layer",
            None,
            vec![
                fc(),
                one(),
                entry("fc.comfy_quant", Dtype::U8, &[2], b"{x".to_vec()),
            ],
            &["`fc.comfy_quant`", "not valid"],
        ),
    ]);
}

#[test]
fn parameters_of_mistral_that_do_not_fit() {
    let tensors = [
        weight("layers.0.attention.wq.weight", 6, 8),
        floats("layers.0.attention.wq.qscale_weight", &[], &[0.1]),
    ];
    let quantization =
        |format: &str, inputs: &str| json!({"qformat_weight": format, "qscheme_act": inputs});
    let cases: [(Value, &[&str]); 6] = [
        (
            json!({"n_heads": 4, "quantization": quantization("fp8_e4m3", "NO_SCALES")}),
            &["wq", "4 heads", "[6, 8]"],
        ),
        (
            json!({"n_heads": 3, "quantization": quantization("fp8_e4m3", "TENSOR")}),
            &["q_proj.qscale_act", "static"],
        ),
        (
            json!({"n_heads": 3, "quantization": quantization("fp8_e4m3", "CHANNEL")}),
            &["quantization.qscheme_act", "CHANNEL"],
        ),
        (
            json!({"n_heads": 3, "quantization": quantization("int8", "TENSOR")}),
            &["quantization.qformat_weight", "int8"],
        ),
        (
            json!({"n_heads": 0, "quantization": quantization("fp8_e4m3", "TENSOR")}),
            &["n_heads", "0"],
        ),
        (json!({"n_heads": 3}), &["q_proj", "high precision"]),
    ];
    for (params, parts) in cases {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("params.json"), params.to_string()).unwrap();
        write(&dir.path().join("consolidated.safetensors"), &tensors, None);
        let text = error_of(Checkpoint::open_dir(dir.path()))
            .unwrap()
            .to_string();
        for part in parts {
            assert!(text.contains(part), "{params}: {text:?} lacks {part:?}");
        }
    }
    // Without the parameters the number of heads is unknown.
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("consolidated.safetensors"), &tensors, None);
    let error = Checkpoint::open_dir(dir.path()).unwrap_err();
    assert!(error.to_string().contains("params.json"), "{error}");
}
