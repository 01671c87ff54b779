//! Unsupported formats.

use super::*;

#[test]
fn unsupported_formats() {
    let tensors = || vec![fc(), one()];
    let quark = |weight: Value| {
        quantized(json!({"quant_method": "quark", "global_quant_config": {"weight": weight}}))
    };
    let mlx = |mode: &str, bits: u32| {
        Some(json!({"quantization": {"group_size": 32, "bits": bits, "mode": mode}}))
    };
    run(vec![
        case(
            "unknown method",
            quantized(json!({"quant_method": "gptq"})),
            tensors(),
            &["quant_method", "gptq", "compressed-tensors"],
        ),
        case(
            "no method",
            quantized(json!({"bits": 4})),
            tensors(),
            &["quant_method", "null"],
        ),
        case(
            "bitsandbytes in the text model",
            Some(json!({"text_config": {"quantization_config": {"quant_method": "bitsandbytes"}}})),
            tensors(),
            &[
                "text_config.quantization_config.quant_method",
                "bitsandbytes",
            ],
        ),
        case(
            "MXFP6",
            compressed(json!({"format": "mxfp6-pack-quantized"})),
            tensors(),
            &["format", "mxfp6-pack-quantized"],
        ),
        case(
            "packed integers",
            compressed(json!({"format": "pack-quantized"})),
            tensors(),
            &["format", "pack-quantized"],
        ),
        case(
            "integers",
            compressed(json!({"format": "int-quantized"})),
            tensors(),
            &["format", "int-quantized"],
        ),
        case(
            "rotated weights",
            compressed(json!({"transform_config": {"config_groups": {"R1": {}}}})),
            tensors(),
            &["transform_config", "R1"],
        ),
        case(
            "sparse weights",
            compressed(json!({"sparsity_config": {"format": "sparse-24-bitmask"}})),
            tensors(),
            &["sparsity_config", "sparse-24"],
        ),
        case(
            "integer cache",
            compressed(json!({"kv_cache_scheme": {"num_bits": 8, "type": "int"}})),
            tensors(),
            &["kv_cache_scheme.type", "int"],
        ),
        case(
            "NVFP4 with AWQ of ModelOpt",
            modelopt(json!("NVFP4_AWQ")),
            tensors(),
            &["quant_algo", "NVFP4_AWQ"],
        ),
        case(
            "W4A8 of ModelOpt",
            modelopt(json!("W4A8_AWQ")),
            tensors(),
            &["quant_algo", "W4A8_AWQ"],
        ),
        case(
            "no algorithm of ModelOpt",
            modelopt(json!(null)),
            tensors(),
            &["quant_algo", "null"],
        ),
        case(
            "integers among others",
            quantized(
                json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"fc": {"quant_algo": "INT8"}}}),
            ),
            tensors(),
            &["quantized_layers.fc.quant_algo", "INT8"],
        ),
        case(
            "packed tensors",
            None,
            vec![entry("fc.weight_packed", Dtype::U8, &[2, 2], vec![1; 4])],
            &["`fc.weight_packed`", "NVFP4"],
        ),
        case(
            "NVFP4 tensors of ModelOpt",
            None,
            vec![floats("fc.weight_scale_2", &[], &[1.])],
            &["`fc.weight_scale_2`", "NVFP4"],
        ),
        case(
            "engine of TensorRT-LLM",
            None,
            vec![floats("fc.weights_scaling_factor", &[], &[1.])],
            &["`fc.weights_scaling_factor`", "TensorRT-LLM"],
        ),
        case(
            "GPTQ tensors",
            None,
            vec![entry("fc.qweight", Dtype::I32, &[1], vec![0; 4])],
            &["`fc.qweight`", "GPTQ"],
        ),
        case(
            "FNUZ",
            autofp8(),
            vec![
                entry("fc.weight", Dtype::F8_E4M3FNUZ, &[2, 2], vec![1; 4]),
                one(),
            ],
            &["`fc.weight`", "F8_E4M3FNUZ", "MI300"],
        ),
        case(
            "E5M2 of FNUZ",
            None,
            vec![entry("fc.weight", Dtype::F8_E5M2FNUZ, &[2, 2], vec![1; 4])],
            &["`fc.weight`", "F8_E5M2FNUZ"],
        ),
        case(
            "E5M2 told",
            blocks(json!({"fmt": "e5m2"})),
            tensors(),
            &["fmt", "e5m2"],
        ),
        case(
            "experts of integers",
            blocks(json!({"expert_dtype": "int4"})),
            tensors(),
            &["expert_dtype", "int4"],
        ),
        case(
            "static blocks",
            blocks(json!({"activation_scheme": "static"})),
            tensors(),
            &["activation_scheme", "static", "blocks"],
        ),
        case(
            "blocks of nothing",
            blocks(json!({"weight_block_size": [0, 128]})),
            tensors(),
            &["weight_block_size", "[0,128]"],
        ),
        case(
            "negative blocks",
            blocks(json!({"weight_block_size": [-128, 128]})),
            tensors(),
            &["weight_block_size", "-128"],
        ),
        case(
            "FBGEMM without sense",
            quantized(json!({"quant_method": "fbgemm_fp8", "activation_scale_ub": -1.0})),
            tensors(),
            &["activation_scale_ub", "-1"],
        ),
        case(
            "FBGEMM beyond f32",
            quantized(json!({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1e300})),
            tensors(),
            &["activation_scale_ub", "1e+300"],
        ),
        case(
            "Quark integers",
            quark(json!({"dtype": "int8", "qscheme": "per_tensor"})),
            tensors(),
            &["global_quant_config.weight.dtype", "int8"],
        ),
        case(
            "Quark along inputs",
            quark(json!({"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 1})),
            tensors(),
            &["ch_axis", "1"],
        ),
        case(
            "integers of MLX",
            mlx("affine", 8),
            tensors(),
            &["quantization.mode", "affine"],
        ),
        case(
            "four bits of MLX",
            mlx("mxfp4", 4),
            tensors(),
            &["quantization.mode", "mxfp4"],
        ),
        case(
            "offsets of MLX",
            mlx("mxfp8", 8),
            vec![floats("fc.biases", &[1], &[1.])],
            &["`fc.biases`", "MLX"],
        ),
        case(
            "MLX words without scales",
            mlx("mxfp8", 8),
            vec![entry("fc.weight", Dtype::U32, &[1, 8], vec![0; 32])],
            &["`fc.weight`", "`fc.scales`"],
        ),
        case(
            "unknown targets",
            compressed(
                json!({"config_groups": {"g": {"targets": [7], "weights": {"num_bits": 8, "type": "float"}}}}),
            ),
            tensors(),
            &["config_groups.g.targets", "[7]"],
        ),
        case(
            "config_groups that are none",
            compressed(json!({"config_groups": "all"})),
            tensors(),
            &["config_groups", "all"],
        ),
    ]);
}

#[test]
fn codes_and_zero_points_of_other_types() {
    let mlx = quantized(json!({"mode": "mxfp8", "bits": 8, "group_size": 32}));
    let zero_point = |dtype, data| entry("fc.weight_zero_point", dtype, &[1], data);
    run(vec![
        case(
            "E5M2 of MLX",
            mlx,
            vec![
                entry("fc.weight", Dtype::F8_E5M2, &[N, K], codes(N * K)),
                entry("fc.scales", Dtype::U8, &[N, K / 32], vec![120; N * K / 32]),
            ],
            &["`fc.weight`", "F8_E5M2", "U32 or F8_E4M3"],
        ),
        case(
            "a zero point of -128",
            compressed(json!({})),
            vec![fc(), one(), zero_point(Dtype::I8, vec![0x80])],
            &["`fc.weight_zero_point`", "-1.28e2"],
        ),
        case(
            "a zero point of a small number",
            compressed(json!({})),
            vec![fc(), one(), zero_point(Dtype::F32, vec![0, 0, 0x80, 0])],
            &["`fc.weight_zero_point`"],
        ),
    ]);
    // The zero of a float may have a sign.
    let tensors = [fc(), one(), zero_point(Dtype::F8_E4M3, vec![0x80])];
    let model = Model::new(compressed(json!({})), &tensors);
    assert!(error_of(model.open()).is_none());
}
