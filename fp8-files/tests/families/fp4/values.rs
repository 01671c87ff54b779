//! The values of every code under every scale, and those of the libraries that write them.

use super::*;

#[test]
fn every_code_of_mxfp4_under_every_scale() {
    // A row for each scale but the NaN, of one group.
    let rows = 255usize;
    let tensors = [
        entry(
            "fc.weight_packed",
            Dtype::U8,
            &[rows, 16],
            all_codes(16).repeat(rows),
        ),
        entry("fc.weight_scale", Dtype::U8, &[rows, 1], (0..255).collect()),
    ];
    let model = Model::new(mxfp4(), &tensors);
    let checkpoint = model.open().unwrap();
    let layer = checkpoint.stored_layer("fc", &Device::Cpu).unwrap();
    assert_eq!(layer.codes.granularity(), Granularity::Mx);
    let got = values(&checkpoint, "fc");
    for scale in 0..rows {
        for column in 0..32 {
            // Rounded only where f32 ends: 4 and 6 times 2^127 are infinite.
            let exact = e2m1(column as u8 % 16) * 2f64.powi(scale as i32 - 127);
            assert_eq!(
                got[scale * 32 + column],
                (exact as f32).to_bits(),
                "{scale} {column}"
            );
        }
    }
}

/// Positive scales: negative ones are refused.
#[test]
fn every_code_of_nvfp4_under_every_scale() {
    let rows = 126usize;
    for (own, is_divisor) in [("weight_global_scale", true), ("weight_scale_2", false)] {
        for global in [1f32, 448. * 6. / 0.37, 0.37 / (448. * 6.), 3.1e-3, 0.1] {
            let shape: &[usize] = if is_divisor { &[1] } else { &[] };
            let codes = match is_divisor {
                true => "fc.weight_packed",
                false => "fc.weight",
            };
            let tensors = [
                entry(codes, Dtype::U8, &[rows, 8], all_codes(8).repeat(rows)),
                entry(
                    "fc.weight_scale",
                    Dtype::F8_E4M3,
                    &[rows, 1],
                    (1..=126).collect(),
                ),
                floats(&format!("fc.{own}"), shape, &[global]),
            ];
            let config = if is_divisor {
                nvfp4()
            } else {
                modelopt("NVFP4")
            };
            let model = Model::new(config, &tensors);
            let checkpoint = model.open().unwrap();
            let got = values(&checkpoint, "fc");
            for row in 0..rows {
                for column in 0..16 {
                    let scale = decode(row as u8 + 1);
                    // In f32, as the libraries compute: the scale first, then its product with the code.
                    let scale = if is_divisor {
                        scale / global
                    } else {
                        scale * global
                    };
                    let expected = e2m1(column as u8) as f32 * scale;
                    assert_eq!(
                        got[row * 16 + column],
                        expected.to_bits(),
                        "{own} {global} {row} {column}"
                    );
                    // Which is the value to two roundings of f32.
                    let global = f64::from(global);
                    let exact = e2m1(column as u8)
                        * f64::from(decode(row as u8 + 1))
                        * if is_divisor { 1. / global } else { global };
                    assert!((f64::from(expected) - exact).abs() <= 1.2e-7 * exact.abs());
                }
            }
        }
    }
}

#[test]
fn values_are_those_of_the_libraries() {
    for (name, family, layers) in [
        ("ct_mxfp4", FamilyName::COMPRESSED_TENSORS, 2),
        ("ct_nvfp4", FamilyName::COMPRESSED_TENSORS, 2),
        ("modelopt_nvfp4", FamilyName::MODEL_OPT, 2),
        ("gpt_oss_mxfp4", FamilyName::MXFP4, 6),
        ("deepseek_v4", FamilyName::FP8_BLOCKS, 3),
    ] {
        let checkpoint =
            Checkpoint::open_dir(folder(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(checkpoint.family(), family, "{name}");
        assert_eq!(checkpoint.layer_paths().len(), layers, "{name}");
        let expected = folder(name).join("expected.safetensors");
        let expected = candle_core::safetensors::load(expected, &Device::Cpu).unwrap();
        for (key, tensor) in &expected {
            let (path, own) = key.rsplit_once('.').unwrap();
            if own != "dequant" {
                let got = checkpoint.tensor(key, &Device::Cpu).unwrap();
                assert_eq!(bits(&got), bits(tensor), "{name}: {key}");
                continue;
            }
            let got = checkpoint.stored_layer(path, &Device::Cpu).unwrap();
            let is_shared = path.contains("shared_experts");
            assert_eq!(checkpoint.is_fp4(path), !is_shared, "{name}: {path}");
            let got = got.codes.dequantize(DType::F32).unwrap();
            assert_eq!(bits(&got), bits(tensor), "{name}: {path}");
        }
    }
}

/// Where all codes of a group are 0 its scale may be 0.
#[test]
fn an_empty_group_may_have_a_scale_of_zero() {
    let mut codes = vec![0u8; 16];
    codes[8..].copy_from_slice(&all_codes(8));
    codes[0] = 0x80;
    let tensors = [
        entry("fc.weight_packed", Dtype::U8, &[1, 16], codes),
        entry("fc.weight_scale", Dtype::F8_E4M3, &[1, 2], vec![0, 0x38]),
        floats("fc.weight_global_scale", &[1], &[2.]),
    ];
    let model = Model::new(nvfp4(), &tensors);
    let got = value(&model.open().unwrap(), "fc");
    assert_eq!(got[..16], [0.; 16]);
    let half = |code: u8| e2m1(code) as f32 * Format::E4M3.decode(0x38) / 2.;
    assert_eq!(got[16..], (0..16).map(half).collect::<Vec<_>>());
}
