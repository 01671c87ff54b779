//! Scales in E8M0: bytes that encode powers of two.

use super::*;
use fp8_core::Granularity;

#[test]
fn exponents_for_tensors_channels_and_small_blocks() {
    let (bytes, power) = powers(N);
    let (of_blocks, power_of_block) = powers(2 * 3);
    let e8m0 = |own: &str, shape: &[usize], bytes: &[u8]| {
        entry(&format!("fc.{own}"), Dtype::F8_E8M0, shape, bytes.to_vec())
    };
    let dynamic = json!({"quant_method": "fp8", "activation_scheme": "dynamic"});
    let mut blocks = dynamic.clone();
    blocks["weight_block_size"] = json!([32, 32]);
    let cases = [
        (
            "tensor",
            dynamic.clone(),
            weight("fc.weight", N, K),
            e8m0("weight_scale", &[], &[121]),
            Granularity::Tensorwise,
            expected(N, K, |_, _| 2f32.powi(-6)),
        ),
        (
            "channels",
            dynamic,
            weight("fc.weight", N, K),
            e8m0("weight_scale", &[N, 1], &bytes),
            Granularity::Rowwise,
            expected(N, K, |row, _| power[row]),
        ),
        (
            "blocks of 32",
            blocks,
            weight("fc.weight", 40, 96),
            e8m0("weight_scale_inv", &[2, 3], &of_blocks),
            Granularity::Blockwise { rows: 32, cols: 32 },
            expected(40, 96, |row, col| power_of_block[row / 32 * 3 + col / 32]),
        ),
    ];
    for (case, config, codes, scale, granularity, values) in cases {
        let model = Model::new(quantized(config), &[codes, scale]);
        let checkpoint = opened(case, &model);
        let scheme = checkpoint.layer_scheme("fc").unwrap();
        assert_eq!(scheme.weight, granularity, "{case}");
        assert_eq!(value(&checkpoint, "fc"), values, "{case}");
    }
}

/// 2^-127 is subnormal in f32, and so is the reciprocal of 2^127. Both are scales of microscaling.
#[test]
fn the_smallest_and_the_largest_exponent() {
    let (n, k) = (2, 128);
    let bytes = [0u8, 254, 1, 253, 254, 0, 127, 128];
    for dtype in [Dtype::U8, Dtype::F8_E8M0] {
        let tensors = [
            weight("fc.weight", n, k),
            entry("fc.weight_scale_inv", dtype, &[n, k / 32], bytes.to_vec()),
        ];
        let config = quantized(json!({"quant_method": "mxfp8"}));
        let model = Model::new(config, &tensors);
        let got = value(&opened("mxfp8", &model), "fc");
        assert_eq!(got.len(), n * k);
        for (at, (got, code)) in got.iter().zip(codes(n * k)).enumerate() {
            let byte = bytes[at / k * (k / 32) + at % k / 32];
            // Exact in f64, then rounded once; beyond the largest f32 it is infinite.
            let exact = f64::from(decode(code)) * 2f64.powi(i32::from(byte) - 127);
            assert_eq!(*got, exact as f32, "code {code} at {at}, byte {byte}");
        }
    }
}
