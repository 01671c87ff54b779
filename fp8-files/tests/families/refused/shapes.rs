//! Shapes and layers that contradict the configuration.

use super::*;

#[test]
fn shapes_that_contradict_the_configuration() {
    run(vec![
        case(
            "channels where one is told",
            modelopt(json!("FP8")),
            vec![
                fc(),
                floats("fc.weight_scale", &[N, 1], &scales(N)),
                input(1.),
            ],
            &["`fc.weight_scale`", "[6, 1]", "[1]"],
        ),
        case(
            "one where channels are told",
            quantized(json!({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0})),
            vec![fc(), one()],
            &["`fc.weight_scale`", "[]", "[6, 1]"],
        ),
        case(
            "channels too few",
            quantized(json!({"quant_method": "w8a8_fp8"})),
            vec![fc(), floats("fc.weight_scale", &[5, 1], &scales(5))],
            &["`fc.weight_scale`", "[5, 1]", "[6, 1]"],
        ),
        case(
            "scales in a row",
            quantized(json!({"quant_method": "w8a8_fp8"})),
            vec![fc(), floats("fc.weight_scale", &[1, N], &scales(N))],
            &["`fc.weight_scale`", "[1, 6]", "[6, 1]"],
        ),
        case(
            "one for two blocks",
            blocks(json!({})),
            vec![fc(), inverse(&[])],
            &["`fc.weight_scale_inv`", "[1, 2]", "128x128"],
        ),
        case(
            "blocks the other way round",
            blocks(json!({})),
            vec![weight("fc.weight", 300, 640), inverse(&[5, 3])],
            &["`fc.weight_scale_inv`", "[5, 3]", "[3, 5]"],
        ),
        case(
            "blocks of another size",
            blocks(json!({})),
            vec![weight("fc.weight", 384, 384), inverse(&[6, 6])],
            &["`fc.weight_scale_inv`", "[6, 6]", "[3, 3]"],
        ),
        case(
            "blocks that look padded",
            blocks(json!({})),
            vec![weight("fc.weight", 192, 256), inverse(&[4, 4])],
            &["`fc.weight_scale_inv`", "padding"],
        ),
        case(
            "too few blocks",
            blocks(json!({})),
            vec![weight("fc.weight", 192, 256), inverse(&[1, 2])],
            &["`fc.weight_scale_inv`", "[1, 2]", "[2, 2]"],
        ),
        case(
            "a block per tensor",
            autofp8(),
            vec![
                weight("fc.weight", 192, 256),
                floats("fc.weight_scale", &[2, 2], &scales(4)),
            ],
            &["`fc.weight_scale`", "[2, 2]"],
        ),
        case(
            "groups of another size",
            modelopt(json!("MXFP8")),
            vec![
                fc(),
                entry(
                    "fc.weight_scale",
                    Dtype::U8,
                    &[N, K / 16],
                    vec![120; N * K / 16],
                ),
            ],
            &["`fc.weight_scale`", "[6, 16]", "[6, 8]"],
        ),
        case(
            "ModelOpt's four dimensions, swapped",
            modelopt(json!("fp8_pb_wo")),
            vec![fc(), floats("fc.weight_scale", &[2, 1, 1, 1], &scales(2))],
            &["`fc.weight_scale`", "[2, 1, 1, 1]", "[1, 2]"],
        ),
        case(
            "channels where a tensor is told",
            compressed(json!({})),
            vec![fc(), floats("fc.weight_scale", &[N, 1], &scales(N))],
            &["`fc.weight_scale`", "[6, 1]"],
        ),
        case(
            "three scales without a configuration",
            None,
            vec![fc(), floats("fc.weight_scale", &[3], &scales(3))],
            &["`fc.weight_scale`", "[3]", "[6, 1]"],
        ),
    ]);
}

/// The rows of a gate and of its up projection follow each other in one tensor.
#[test]
fn a_block_may_not_span_two_projections_of_an_expert() {
    let tensors = |inner: usize, rows: usize| {
        let own = |own: &str| format!("model.layers.0.mlp.experts.gate_up_proj{own}");
        let dims = [2, 2 * inner, 128];
        vec![
            entry(
                &own(""),
                Dtype::F8_E4M3,
                &dims,
                codes(dims.iter().product()),
            ),
            floats(&own("_scale_inv"), &[2, rows, 1], &scales(2 * rows)),
        ]
    };
    let config = || {
        let mut config = blocks(json!({})).unwrap();
        config["model_type"] = json!("qwen3_moe");
        Some(config)
    };
    run(vec![case(
        "a block across both",
        config(),
        tensors(96, 2),
        &[
            "`model.layers.0.mlp.experts.gate_up_proj_scale_inv`",
            "[2, 2, 1]",
            "the 96 rows",
        ],
    )]);
    // Blocks that end where the gate ends, and one block for both.
    for (inner, rows) in [(128, 2), (256, 4), (64, 1)] {
        let model = Model::new(config(), &tensors(inner, rows));
        assert!(error_of(model.open()).is_none(), "{inner}");
    }
}

#[test]
fn layers_that_the_configuration_leaves_out() {
    let head = || {
        vec![
            weight("lm_head.weight", N, K),
            floats("lm_head.weight_scale", &[], &[0.02]),
        ]
    };
    let first = || {
        vec![
            weight("model.layers.0.fc.weight", N, K),
            floats("model.layers.0.fc.weight_scale", &[], &[0.02]),
            floats("model.layers.0.fc.input_scale", &[], &[1.]),
        ]
    };
    let quark = quantized(json!({"quant_method": "quark", "exclude": ["re:lm_.*"],
        "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, "input_tensors": null}}));
    let listed = json!({"fd": {"quant_algo": "FP8"}});
    let mixed = quantized(
        json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": listed}),
    );
    run(vec![
        case(
            "ignored by AutoFP8",
            autofp8(),
            head(),
            &["`lm_head`", "`lm_head.weight`", "config.json"],
        ),
        case(
            "ignored by compressed-tensors",
            compressed(json!({})),
            head(),
            &["`lm_head`", "high precision"],
        ),
        case(
            "excluded by a glob of ModelOpt",
            modelopt(json!("FP8")),
            first(),
            &["`model.layers.0.fc`", "high precision"],
        ),
        case(
            "excluded by an expression of Quark",
            quark,
            head(),
            &["`lm_head`", "high precision"],
        ),
        case(
            "not listed as mixed",
            mixed,
            vec![fc(), one(), input(1.)],
            &["`fc`", "high precision"],
        ),
        case(
            "ignored with its scale left behind",
            compressed(json!({})),
            vec![
                plain("lm_head.weight"),
                floats("lm_head.weight_scale", &[], &[1.]),
            ],
            &["`lm_head.weight`", "`lm_head.weight_scale`", "F32"],
        ),
    ]);
}

#[test]
fn a_layer_in_high_precision_is_loaded_as_it_is() {
    // The configuration targets the layer, but its weight is in high precision.
    for config in [
        autofp8(),
        blocks(json!({})),
        modelopt(json!("FP8")),
        compressed(json!({})),
    ] {
        let checkpoint = Model::new(config, &[plain("fd.weight")]).open().unwrap();
        assert!(checkpoint.layer_paths().is_empty());
        let vb = checkpoint.var_builder(DType::F32, &Device::Cpu).unwrap();
        let layer = fp8_recipes::nn::linear_no_bias(2, 2, vb.pp("fd")).unwrap();
        assert!(layer.static_weight().is_none());
    }
}

#[test]
fn layers_that_two_entries_describe_differently() {
    let args = |strategy: &str| json!({"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": false});
    let group =
        |strategy: &str, target: &str| json!({"targets": [target], "weights": args(strategy)});
    let groups =
        |b: Value| compressed(json!({"config_groups": {"a": group("tensor", "re:f.*"), "b": b}}));
    let quark = |scheme: &str| json!({"weight": {"dtype": "fp8_e4m3", "qscheme": scheme}});
    let layers = |b: &str| {
        quantized(
            json!({"quant_method": "quark", "global_quant_config": quark("per_tensor"),
            "layer_quant_config": {"*c": quark(b), "f*": quark("per_tensor")}}),
        )
    };
    run(vec![
        case(
            "two groups",
            groups(group("channel", "re:.*c")),
            vec![fc(), one()],
            &["`fc`", "config_groups.a`", "config_groups.b`"],
        ),
        case(
            "two globs",
            layers("per_channel"),
            vec![fc(), one()],
            &["`fc`", "layer_quant_config.*c`", "layer_quant_config.f*`"],
        ),
    ]);
    // Entries that agree, or of a lower rank, are no conflict.
    for config in [
        groups(group("tensor", "re:.*c")),
        groups(group("channel", "Linear")),
        layers("per_tensor"),
    ] {
        let model = Model::new(config, &[fc(), one()]);
        assert!(error_of(model.open()).is_none());
    }
}
