//! Checkpoints that are damaged, contradict themselves or belong to another format. Each is refused with an error that
//! names what is wrong: nothing is loaded with a guess.

use crate::support::*;
use candle_core::{DType, Device};
use fp8_recipes::Error;
use fp8_recipes::load::Checkpoint;
use safetensors::Dtype;
use serde_json::{Value, json};
use std::collections::HashMap;

const N: usize = 6;
const K: usize = 256;

/// The first error of opening the model and reading everything in it.
fn error_of(checkpoint: Result<Checkpoint, Error>) -> Option<Error> {
    let checkpoint = match checkpoint {
        Ok(checkpoint) => checkpoint,
        Err(error) => return Some(error),
    };
    for path in checkpoint.layer_paths() {
        if let Err(error) = checkpoint.stored_layer(&path, &Device::Cpu) {
            return Some(error);
        }
    }
    let names = checkpoint.other_names();
    let mut errors = names
        .iter()
        .map(|name| checkpoint.tensor(name, &Device::Cpu).err());
    errors.find_map(|error| error)
}

fn quantized(config: Value) -> Option<Value> {
    Some(json!({"quantization_config": config}))
}

fn autofp8() -> Option<Value> {
    quantized(
        json!({"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}),
    )
}

fn autofp8_static() -> Option<Value> {
    quantized(json!({"quant_method": "fp8", "activation_scheme": "static"}))
}

fn blocks(more: Value) -> Option<Value> {
    let mut config = json!({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]});
    for (key, value) in more.as_object().unwrap() {
        config[key] = value.clone();
    }
    quantized(config)
}

fn modelopt(algo: Value) -> Option<Value> {
    quantized(
        json!({"quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head", "model.layers.0*"]}),
    )
}

fn compressed(more: Value) -> Option<Value> {
    let args = json!({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": false});
    let mut config = json!({"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"g": {"targets": ["Linear"], "weights": args, "input_activations": null}}});
    for (key, value) in more.as_object().unwrap() {
        config[key] = value.clone();
    }
    quantized(config)
}

fn fc() -> Entry {
    weight("fc.weight", N, K)
}

fn one() -> Entry {
    floats("fc.weight_scale", &[], &[0.02])
}

fn input(value: f32) -> Entry {
    floats("fc.input_scale", &[], &[value])
}

fn plain(name: &str) -> Entry {
    floats(name, &[2, 2], &[1., 2., 3., 4.])
}

fn inverse(shape: &[usize]) -> Entry {
    floats(
        "fc.weight_scale_inv",
        shape,
        &scales(shape.iter().product()),
    )
}

struct Case {
    name: &'static str,
    config: Option<Value>,
    tensors: Vec<Entry>,
    metadata: Option<HashMap<String, String>>,
    parts: &'static [&'static str],
}

fn case(
    name: &'static str,
    config: Option<Value>,
    tensors: Vec<Entry>,
    parts: &'static [&'static str],
) -> Case {
    Case {
        name,
        config,
        tensors,
        metadata: None,
        parts,
    }
}

fn run(cases: Vec<Case>) {
    for case in cases {
        let model = Model::with(case.config, &case.tensors, case.metadata);
        let name = case.name;
        let error = error_of(model.open()).unwrap_or_else(|| panic!("{name}: opened"));
        assert!(
            !matches!(error, Error::Candle(_) | Error::Fp8(_)),
            "{name}: {error:?}"
        );
        let text = error.to_string();
        for part in case.parts {
            assert!(text.contains(part), "{name}: {text:?} lacks {part:?}");
        }
        // Which file or configuration it is.
        let places = ["model.safetensors", "config.json"];
        assert!(
            places.iter().any(|place| text.contains(place)),
            "{name}: {text:?} names no file"
        );
    }
}

#[test]
fn weights_and_scales_that_do_not_belong_together() {
    let nan = f32::NAN;
    let mut nan_code = fc();
    nan_code.data[77] = 0xFF;
    run(vec![
        case(
            "no scale",
            autofp8(),
            vec![fc()],
            &["`fc.weight`", "`fc.weight_scale`"],
        ),
        case(
            "no scale without a configuration",
            None,
            vec![fc()],
            &["`fc.weight`", "`fc.weight_scale`"],
        ),
        case(
            "no scale in blocks",
            blocks(json!({})),
            vec![fc()],
            &["`fc.weight`", "`fc.weight_scale_inv`"],
        ),
        case(
            "scale under a name of another family",
            autofp8(),
            vec![fc(), floats("fc.scale_weight", &[], &[0.1])],
            &["`fc.weight`", "`fc.weight_scale`"],
        ),
        case(
            "scale without a weight",
            autofp8(),
            vec![one()],
            &["`fc.weight`", "missing", "`fc.weight_scale`"],
        ),
        case(
            "scale of a plain weight",
            autofp8(),
            vec![plain("fc.weight"), one()],
            &["`fc.weight`", "F32", "F8_E4M3"],
        ),
        case(
            "scale of an integer weight",
            autofp8(),
            vec![entry("fc.weight", Dtype::I8, &[2, 2], vec![1; 4]), one()],
            &["`fc.weight`", "I8", "F8_E4M3"],
        ),
        case(
            "two scales",
            blocks(json!({})),
            vec![
                fc(),
                inverse(&[1, 2]),
                floats("fc.weight_scale", &[1, 2], &[1., 1.]),
            ],
            &["`fc.weight_scale`", "`fc.weight_scale_inv`", "expected one"],
        ),
        case(
            "two input scales",
            autofp8_static(),
            vec![fc(), one(), input(1.), floats("fc.act_scale", &[], &[1.])],
            &["`fc.input_scale`", "`fc.act_scale`"],
        ),
        case(
            "scale of NaN",
            autofp8(),
            vec![fc(), floats("fc.weight_scale", &[], &[nan])],
            &["`fc.weight_scale`", "NaN", "index 0"],
        ),
        case(
            "scale of infinity",
            autofp8(),
            vec![fc(), floats("fc.weight_scale", &[], &[f32::INFINITY])],
            &["`fc.weight_scale`", "inf"],
        ),
        case(
            "scale of 0",
            autofp8(),
            vec![fc(), floats("fc.weight_scale", &[], &[0.])],
            &["`fc.weight_scale`", "0e0"],
        ),
        case(
            "negative scale",
            autofp8(),
            vec![fc(), floats("fc.weight_scale", &[], &[-0.5])],
            &["`fc.weight_scale`", "-5e-1"],
        ),
        case(
            "subnormal scale",
            autofp8(),
            vec![fc(), floats("fc.weight_scale", &[], &[1e-40])],
            &["`fc.weight_scale`", "e-4"],
        ),
        case(
            "NaN in one block",
            blocks(json!({})),
            vec![fc(), floats("fc.weight_scale_inv", &[1, 2], &[1., nan])],
            &["`fc.weight_scale_inv`", "NaN", "index 1"],
        ),
        case(
            "NaN of E8M0",
            quantized(json!({"quant_method": "mxfp8"})),
            vec![
                fc(),
                entry(
                    "fc.weight_scale_inv",
                    Dtype::U8,
                    &[N, K / 32],
                    vec![255; N * K / 32],
                ),
            ],
            &["`fc.weight_scale_inv`", "E8M0"],
        ),
        case(
            "code of NaN",
            autofp8(),
            vec![nan_code, one()],
            &["`fc.weight`", "NaN", "index 77"],
        ),
        case(
            "E5M2",
            autofp8(),
            vec![
                entry("fc.weight", Dtype::F8_E5M2, &[2, 2], vec![1; 4]),
                one(),
            ],
            &["`fc.weight`", "F8_E5M2", "F8_E4M3"],
        ),
        case(
            "integer scale",
            autofp8(),
            vec![
                fc(),
                entry("fc.weight_scale", Dtype::I32, &[1], vec![1, 0, 0, 0]),
            ],
            &["`fc.weight_scale`", "I32", "F32"],
        ),
        case(
            "bytes as a scale",
            autofp8(),
            vec![fc(), entry("fc.weight_scale", Dtype::U8, &[1], vec![120])],
            &["`fc.weight_scale`", "U8", "F32"],
        ),
        case(
            "numbers where microscaling has bytes",
            modelopt(json!("MXFP8")),
            vec![
                fc(),
                floats("fc.weight_scale", &[N, K / 32], &scales(N * K / 32)),
            ],
            &["`fc.weight_scale`", "F32", "U8"],
        ),
        case(
            "no static input",
            autofp8_static(),
            vec![fc(), one()],
            &["`fc.input_scale`", "config.json", "static"],
        ),
        case(
            "no static input of ModelOpt",
            modelopt(json!("FP8")),
            vec![fc(), one()],
            &["`fc.input_scale`", "config.json"],
        ),
        case(
            "an input scale that is not told",
            autofp8(),
            vec![fc(), one(), input(0.5)],
            &["`fc`", "`fc.input_scale`", "config.json"],
        ),
        case(
            "input scale of NaN",
            autofp8_static(),
            vec![fc(), one(), input(nan)],
            &["`fc.input_scale`", "NaN"],
        ),
        case(
            "input scale of 0",
            autofp8_static(),
            vec![fc(), one(), input(0.)],
            &["`fc.input_scale`", "0e0"],
        ),
        case(
            "three input scales",
            autofp8_static(),
            vec![fc(), one(), floats("fc.input_scale", &[3], &[1., 1., 1.])],
            &["`fc.input_scale`", "[3]", "one element"],
        ),
        case(
            "integer input scale",
            autofp8_static(),
            vec![
                fc(),
                one(),
                entry("fc.input_scale", Dtype::U8, &[1], vec![1]),
            ],
            &["`fc.input_scale`", "U8"],
        ),
        case(
            "input scale without a weight",
            autofp8_static(),
            vec![fc(), one(), input(1.), floats("fd.input_scale", &[], &[1.])],
            &["`fd.weight`", "`fd.input_scale`"],
        ),
        case(
            "input scale of a plain weight",
            autofp8_static(),
            vec![plain("fd.weight"), floats("fd.input_scale", &[], &[1.])],
            &["`fd.weight`", "F32", "`fd.input_scale`"],
        ),
        case(
            "FP8 bias",
            autofp8(),
            vec![
                fc(),
                one(),
                entry("fc.bias", Dtype::F8_E4M3, &[N], vec![1; N]),
            ],
            &["`fc.bias`", "`fc.bias_scale`"],
        ),
        case(
            "FP8 experts in one tensor",
            autofp8(),
            vec![
                entry("e.weight", Dtype::F8_E4M3, &[2, 2, 2], vec![1; 8]),
                floats("e.weight_scale", &[], &[1.]),
            ],
            &["`e.weight`", "[2, 2, 2]", "two dimensions"],
        ),
        case(
            "FP8 vector",
            autofp8(),
            vec![
                entry("e.weight", Dtype::F8_E4M3, &[8], vec![1; 8]),
                floats("e.weight_scale", &[], &[1.]),
            ],
            &["`e.weight`", "[8]"],
        ),
        case(
            "zero point",
            compressed(json!({})),
            vec![
                fc(),
                one(),
                entry("fc.weight_zero_point", Dtype::I8, &[1], vec![3]),
            ],
            &["`fc.weight_zero_point`", "symmetric"],
        ),
        case(
            "cache scale of NaN",
            autofp8(),
            vec![floats("a.self_attn.k_scale", &[], &[nan])],
            &["`a.self_attn.k_scale`", "NaN"],
        ),
        case(
            "cache scale of a matrix",
            autofp8(),
            vec![plain("a.self_attn.k_scale")],
            &["`a.self_attn.k_scale`", "[2, 2]", "heads"],
        ),
        case(
            "cache scale twice",
            autofp8(),
            vec![
                floats("a.self_attn.k_scale", &[], &[1.]),
                floats("a.self_attn.k_proj.k_scale", &[], &[1.]),
            ],
            &["`a.self_attn.k_scale`", "`a.self_attn.k_proj.k_scale`"],
        ),
        case(
            "integer cache scale",
            autofp8(),
            vec![entry("a.self_attn.v_scale", Dtype::I64, &[], vec![0; 8])],
            &["`a.self_attn.v_scale`", "I64"],
        ),
    ]);
}

#[test]
fn shapes_that_the_configuration_does_not_mean() {
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
fn formats_that_are_not_read() {
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
            "NVFP4",
            compressed(json!({"format": "nvfp4-pack-quantized"})),
            tensors(),
            &["format", "nvfp4-pack-quantized"],
        ),
        case(
            "MXFP4",
            compressed(json!({"format": "mxfp4-pack-quantized"})),
            tensors(),
            &["format", "mxfp4-pack-quantized"],
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
            "NVFP4 of ModelOpt",
            modelopt(json!("NVFP4")),
            tensors(),
            &["quant_algo", "NVFP4"],
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
            "NVFP4 among others",
            quantized(
                json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"fc": {"quant_algo": "NVFP4"}}}),
            ),
            tensors(),
            &["quantized_layers.fc.quant_algo", "NVFP4"],
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
            "FP4 experts",
            blocks(json!({"expert_dtype": "fp4"})),
            tensors(),
            &["expert_dtype", "fp4"],
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
    // Without the parameters nobody knows the heads.
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("consolidated.safetensors"), &tensors, None);
    let error = Checkpoint::open_dir(dir.path()).unwrap_err();
    assert!(error.to_string().contains("params.json"), "{error}");
}

#[test]
fn a_layer_in_high_precision_is_loaded_as_it_is() {
    // Targeted, but stored in high precision: nothing is lost.
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
    // What says the same, or less exactly, contradicts nothing.
    for config in [
        groups(group("tensor", "re:.*c")),
        groups(group("channel", "Linear")),
        layers("per_tensor"),
    ] {
        let model = Model::new(config, &[fc(), one()]);
        assert!(error_of(model.open()).is_none());
    }
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
    // A float's zero may have a sign.
    let tensors = [fc(), one(), zero_point(Dtype::F8_E4M3, vec![0x80])];
    let model = Model::new(compressed(json!({})), &tensors);
    assert!(error_of(model.open()).is_none());
}
