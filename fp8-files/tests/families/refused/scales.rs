//! Weights without scales, scales without weights, and invalid scales.

use super::*;

#[test]
fn weights_and_scales_that_do_not_fit() {
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
            "the least exponent for a block",
            blocks(json!({})),
            vec![
                fc(),
                entry("fc.weight_scale_inv", Dtype::F8_E8M0, &[1, 2], vec![120, 0]),
            ],
            &["`fc.weight_scale_inv`", "index 1", "subnormal"],
        ),
        case(
            "the largest exponent for a block",
            blocks(json!({})),
            vec![
                fc(),
                entry(
                    "fc.weight_scale_inv",
                    Dtype::F8_E8M0,
                    &[1, 2],
                    vec![254, 120],
                ),
            ],
            &["`fc.weight_scale_inv`", "index 0", "reciprocal"],
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
            "two numbers for a cache's scale",
            autofp8(),
            vec![
                floats("a.self_attn.k_scale", &[], &[0.5]),
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
