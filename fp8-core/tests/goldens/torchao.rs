//! Dynamic scaling, granularities and codes against torchao 0.18's `Float8Linear`.

use crate::common::{f32s, golden, same_code, u8s};
use fp8_core::{
    Cast, Contraction, Format, Granularity, amax_rows, dynamic_quant_scale, encode_rows,
    floor_to_power_of_two,
};
use half::bf16;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

fn values(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let tensor = file.tensor(name).unwrap();
    match tensor.dtype() {
        Dtype::BF16 => {
            let to_f32 = |&bytes| bf16::from_le_bytes(bytes).to_f32();
            tensor
                .data()
                .as_chunks::<2>()
                .0
                .iter()
                .map(to_f32)
                .collect()
        }
        _ => f32s(file, name),
    }
}

fn transpose(matrix: &[f32], cols: usize) -> Vec<f32> {
    (0..cols)
        .flat_map(|col| matrix.iter().skip(col).step_by(cols).copied())
        .collect()
}

#[test]
fn scales_and_codes_equal_torchao() {
    let bytes = golden("torchao_float8linear.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let index: Value = serde_json::from_slice(&golden("torchao_float8linear.json")).unwrap();
    let (mut scales_compared, mut codes_compared) = (0, 0);
    for case in index["cases"].as_array().unwrap() {
        let (key, inputs) = (
            case["key"].as_str().unwrap(),
            case["inputs"].as_str().unwrap(),
        );
        for (operand, info) in case["operands"].as_object().unwrap() {
            let format: Format = info["dtype"].as_str().unwrap().parse().unwrap();
            let shape: Vec<usize> = serde_json::from_value(info["data_shape"].clone()).unwrap();
            let (&cols, leading) = shape.split_last().unwrap();
            let rows = leading.iter().product();
            let data = match operand.as_bytes()[0] {
                b'w' => transpose(&values(&file, &format!("{inputs}.w")), rows),
                tensor => values(&file, &format!("{inputs}.{}", tensor as char)),
            };
            let grid = match info["axiswise_dim"].as_i64() {
                None => Granularity::Tensorwise.grid(rows, cols, Contraction::Cols),
                Some(0) => Granularity::Rowwise.grid(rows, cols, Contraction::Rows),
                Some(_) => Granularity::Rowwise.grid(rows, cols, Contraction::Cols),
            };
            let mut scales = vec![0.0; grid.len()];
            amax_rows(&data, 0, &grid, &mut scales);
            for scale in &mut scales {
                *scale = dynamic_quant_scale(*scale, format);
                if case["pow2"] == true {
                    *scale = floor_to_power_of_two(*scale);
                }
            }
            let Ok(_) = file.tensor(&format!("{key}.scale.{operand}")) else {
                continue;
            };
            let expected = f32s(&file, &format!("{key}.scale.{operand}"));
            assert_eq!(scales.len(), expected.len(), "{key} {operand}");
            for (ours, theirs) in scales.iter().zip(&expected) {
                assert!(
                    ours == theirs || ours.is_nan() && theirs.is_nan(),
                    "{key} {operand}: {ours:e} {theirs:e}"
                );
            }
            scales_compared += 1;

            let name = format!("{key}.codes.{operand}");
            if file.tensor(&name).is_ok() {
                let mut codes = vec![0; data.len()];
                encode_rows(&Cast::new(format), &data, 0, &grid, &scales, &mut codes);
                for (at, (&ours, &theirs)) in codes.iter().zip(u8s(&file, &name)).enumerate() {
                    assert!(
                        same_code(format, ours, theirs),
                        "{name} at {at}: {ours:#04x} {theirs:#04x}"
                    );
                }
                codes_compared += 1;
            }
        }
    }
    assert!(
        scales_compared > 500 && codes_compared > 50,
        "{scales_compared} {codes_compared}"
    );
}
