//! Weights in MXFP4 and NVFP4: the values of every code under every scale, those of the libraries that write them, and files that
//! contradict themselves.

use crate::support::*;
use candle_core::{DType, Device};
use fp8_core::{Format, Granularity};
use fp8_files::Error;
use fp8_files::load::{Checkpoint, FamilyName};
use fp8_files::rewrite::{self, Scheme, Spelling, WriteOptions};
use fp8_recipes::nn::{self, InputScaling};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The value of an E2M1 code, by the table of the OCP specification.
fn e2m1(code: u8) -> f64 {
    let magnitude = [0., 0.5, 1., 1.5, 2., 3., 4., 6.][usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

fn compressed(group: Value, format: &str) -> Option<Value> {
    let group = json!({"targets": ["Linear"], "weights": group, "input_activations": null});
    Some(
        json!({"quantization_config": {"quant_method": "compressed-tensors", "format": format,
        "config_groups": {"g": group}, "ignore": []}}),
    )
}

fn mxfp4() -> Option<Value> {
    let args = json!({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"});
    compressed(args, "mxfp4-pack-quantized")
}

fn nvfp4() -> Option<Value> {
    let args = json!({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn"});
    compressed(args, "nvfp4-pack-quantized")
}

fn modelopt(algo: &str) -> Option<Value> {
    Some(json!({"quantization_config": {"quant_method": "modelopt", "quant_algo": algo}}))
}

/// Bytes of a row that has every code: pair `i` is code `2i % 16` in the low half and the next one in the high half.
fn all_codes(pairs: usize) -> Vec<u8> {
    let pair = |i: usize| ((2 * i % 16) | ((2 * i + 1) % 16) << 4) as u8;
    (0..pairs).map(pair).collect()
}

/// Bits, in which -0 differs from 0.
fn values(checkpoint: &Checkpoint, path: &str) -> Vec<u32> {
    let values = value(checkpoint, path).into_iter();
    values.map(f32::to_bits).collect()
}

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

/// Scales in FP8 of both signs are read by no engine as anything but magnitudes; a negative one is damage.
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

fn folder(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    root.join("../tests/golden/fp4").join(name)
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

/// Inputs in FP4 stay in high precision; those of DeepSeek-V4's experts are cast as those of its other layers.
#[test]
fn inputs_and_layers() {
    for (name, path, has_input) in [
        ("ct_mxfp4", "model.layers.0.mlp.up_proj", false),
        ("ct_nvfp4", "model.layers.0.mlp.up_proj", false),
        ("modelopt_nvfp4", "model.layers.0.mlp.up_proj", false),
        (
            "gpt_oss_mxfp4",
            "model.layers.0.mlp.experts.1.gate_proj",
            false,
        ),
        ("deepseek_v4", "layers.0.ffn.experts.0.w1", true),
    ] {
        let checkpoint = Checkpoint::open_dir(folder(name)).unwrap();
        let layer = checkpoint.stored_layer(path, &Device::Cpu).unwrap();
        let expected = match has_input {
            true => InputScaling::<()>::per_group(128).with_power_of_two(true),
            false => InputScaling::None,
        };
        assert_eq!(
            format!("{:?}", layer.input),
            format!("{expected:?}"),
            "{name}"
        );
        let &[n, k] = layer.codes.dims() else {
            panic!("{name}")
        };
        let weight = layer.codes.dequantize(DType::F32).unwrap();
        let vb = checkpoint.var_builder(DType::F32, &Device::Cpu).unwrap();
        let layer = nn::linear_no_bias(k, n, vb.pp(path)).unwrap();
        assert_eq!(bits(&layer.weight().unwrap()), bits(&weight), "{name}");
        // Small whole numbers, which a cast to FP8 does not change.
        let x: Vec<f32> = (0..3 * k).map(|i| (i * 7 % 17) as f32 - 8.).collect();
        let x = candle_core::Tensor::from_vec(x, (3, k), &Device::Cpu).unwrap();
        let got = candle_core::Module::forward(&layer, &x).unwrap();
        let plain = x.matmul(&weight.t().unwrap()).unwrap();
        let close = fp8_test_support::sqnr(&plain, &got);
        assert!(close > 120., "{name}: {close} dB");
    }
}

/// FP4 becomes FP8 without a second rounding: codes and scales of the target have the values of the source.
#[test]
fn conversion_to_fp8_is_exact() {
    for (name, path, scale) in [
        ("ct_mxfp4", "model.layers.0.mlp.down_proj", Dtype::U8),
        ("ct_nvfp4", "model.layers.0.mlp.down_proj", Dtype::F32),
        ("modelopt_nvfp4", "model.layers.0.mlp.down_proj", Dtype::F32),
    ] {
        let checkpoint = Checkpoint::open_dir(folder(name)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("fp8");
        let (spelling, options) = (Spelling::CompressedTensors, WriteOptions::new());
        rewrite::convert(
            &checkpoint,
            &target,
            spelling,
            &options,
            &mut rewrite::quiet,
        )
        .unwrap();
        let again = Checkpoint::open_dir(&target).unwrap();
        assert!(!again.is_fp4(path), "{name}");
        assert_eq!(
            again.dtype(&format!("{path}.weight_scale")),
            Some(scale),
            "{name}"
        );
        assert_eq!(values(&again, path), values(&checkpoint, path), "{name}");
    }
}

/// A scheme of FP8 that cannot hold the values rounds them, and the report says by how much.
#[test]
fn requantizing_states_the_error() {
    let checkpoint = Checkpoint::open_dir(folder("ct_nvfp4")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("fp8");
    let options = rewrite::QuantizeOptions::new(Scheme::Mxfp8);
    let report = rewrite::quantize(&checkpoint, &target, &options, &mut rewrite::quiet).unwrap();
    assert_eq!(report.requantized, checkpoint.layer_paths());
    let again = Checkpoint::open_dir(&target).unwrap();
    let relative = |path: &String| {
        let (old, new) = (value(&checkpoint, path), value(&again, path));
        let norm = |x: &mut dyn Iterator<Item = f32>| {
            let squares = x.map(|x| f64::from(x).powi(2));
            squares.sum::<f64>().sqrt()
        };
        let difference = norm(&mut old.iter().zip(&new).map(|(old, new)| new - old));
        difference / norm(&mut old.iter().copied())
    };
    let largest = checkpoint
        .layer_paths()
        .iter()
        .map(relative)
        .fold(0., f64::max);
    let stated = report
        .requantization_error
        .expect("layers were requantized");
    assert!(
        (f64::from(stated) - largest).abs() < 1e-6 * largest,
        "{stated} {largest}"
    );
    assert!((1e-3..0.05).contains(&stated), "{stated}");
    // Powers of two of MXFP4 are among those of MXFP8, and its codes among the codes.
    let checkpoint = Checkpoint::open_dir(folder("ct_mxfp4")).unwrap();
    let target = dir.path().join("exact");
    let report = rewrite::quantize(&checkpoint, &target, &options, &mut rewrite::quiet).unwrap();
    assert_eq!(report.requantization_error, Some(0.));
}

/// Description, configuration, tensors, and what the error says.
type Case = (&'static str, Option<Value>, Vec<Entry>, Vec<&'static str>);

#[test]
fn damaged_weights_are_refused() {
    let packed = |own: &str| entry(&format!("fc.{own}"), Dtype::U8, &[2, 16], all_codes(32));
    let mx_scale = |byte: u8| entry("fc.weight_scale", Dtype::U8, &[2, 1], vec![byte; 2]);
    let nv_scale = |code: u8| entry("fc.weight_scale", Dtype::F8_E4M3, &[2, 2], vec![code; 4]);
    let global = |value| floats("fc.weight_global_scale", &[1], &[value]);
    let fp8 = weight("fc.weight", 2, 32);
    let cases: Vec<Case> = vec![
        (
            "a scale of NaN",
            mxfp4(),
            vec![packed("weight_packed"), mx_scale(255)],
            vec!["`fc.weight_scale`", "NaN"],
        ),
        (
            "no scale",
            mxfp4(),
            vec![packed("weight_packed")],
            vec!["`fc.weight_packed`", "weight_scale"],
        ),
        (
            "no global scale",
            nvfp4(),
            vec![packed("weight_packed"), nv_scale(56)],
            vec!["`fc.weight_packed`", "`fc.weight_global_scale`"],
        ),
        (
            "a global scale of 0",
            nvfp4(),
            vec![packed("weight_packed"), nv_scale(56), global(0.)],
            vec!["`fc.weight_global_scale`", "positive"],
        ),
        (
            "a stray global scale",
            nvfp4(),
            vec![global(1.), plain()],
            vec!["`fc.weight_global_scale`", "missing"],
        ),
        (
            "a global scale of MXFP4",
            mxfp4(),
            vec![packed("weight_packed"), mx_scale(120), global(1.)],
            vec!["`fc`", "`fc.weight_global_scale`"],
        ),
        (
            "a negative scale",
            nvfp4(),
            vec![packed("weight_packed"), nv_scale(0xB8), global(1.)],
            vec!["`fc.weight_scale`", "positive"],
        ),
        (
            "a scale of 0",
            nvfp4(),
            vec![packed("weight_packed"), nv_scale(0), global(1.)],
            vec!["`fc.weight_scale`", "positive"],
        ),
        (
            "scales of MXFP4 under NVFP4",
            nvfp4(),
            vec![packed("weight_packed"), mx_scale(120), global(1.)],
            vec!["`fc.weight_scale`", "[2, 2]"],
        ),
        (
            "FP8 codes under NVFP4",
            modelopt("NVFP4"),
            vec![fp8.clone(), nv_scale(56)],
            vec!["`fc.weight`", "F8_E4M3", "U8 or I8"],
        ),
        (
            "FP4 codes under FP8",
            modelopt("MXFP8"),
            vec![packed("weight"), mx_scale(120)],
            vec!["`fc.weight`", "U8", "F8_E4M3"],
        ),
        (
            "groups of another size",
            compressed(
                json!({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 64}),
                "mxfp4-pack-quantized",
            ),
            vec![packed("weight_packed"), mx_scale(120)],
            vec!["config_groups.g.weights", "32"],
        ),
        (
            "packed words",
            mxfp4(),
            vec![entry("fc.weight_packed", Dtype::I32, &[2, 4], vec![0; 32])],
            vec!["`fc.weight_packed`"],
        ),
    ];
    for (name, config, tensors, parts) in cases {
        let model = Model::new(config, &tensors);
        let read = |checkpoint: Checkpoint| checkpoint.stored_layer("fc", &Device::Cpu).map(|_| ());
        let error = model.open().and_then(read).expect_err(name);
        assert!(
            !matches!(error, Error::Candle(_) | Error::Fp8(_)),
            "{name}: {error:?}"
        );
        let text = error.to_string();
        for part in parts {
            assert!(text.contains(part), "{name}: {text:?} lacks {part:?}");
        }
    }
}

fn plain() -> Entry {
    floats("other.weight", &[2, 2], &[1., 2., 3., 4.])
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

/// gpt-oss: rows of gate and up projection alternate, and a tensor of the wrong shape is named.
#[test]
fn experts_in_one_tensor() {
    let config =
        Some(json!({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}));
    let name = "model.layers.0.mlp.experts.gate_up_proj";
    let blocks = |shape: &[usize]| {
        let bytes = (0..shape.iter().product())
            .map(|i: usize| i as u8)
            .collect();
        entry(&format!("{name}_blocks"), Dtype::U8, shape, bytes)
    };
    let scales = |shape: &[usize]| {
        let bytes = (0..shape.iter().product())
            .map(|i: usize| 120 + i as u8 % 8)
            .collect();
        entry(&format!("{name}_scales"), Dtype::U8, shape, bytes)
    };
    let model = Model::new(
        config.clone(),
        &[blocks(&[2, 6, 1, 16]), scales(&[2, 6, 1])],
    );
    let checkpoint = model.open().unwrap();
    let up = value(&checkpoint, "model.layers.0.mlp.experts.1.up_proj");
    // Row 2 of the up projection of expert 1 is row 6 + 2 * 2 + 1 of all.
    let row = 11;
    let first = e2m1((row * 16) as u8 & 0xF) * 2f64.powi(120 + row % 8 - 127);
    assert_eq!(up[2 * 32], first as f32);
    assert_eq!(up.len(), 3 * 32);
    for (tensors, part) in [
        (
            vec![blocks(&[2, 6, 16]), scales(&[2, 6, 1])],
            "[experts, features, groups, bytes of a group]",
        ),
        (
            vec![blocks(&[2, 5, 1, 16]), scales(&[2, 5, 1])],
            "as many rows for gates",
        ),
        (
            vec![blocks(&[2, 6, 1, 16]), scales(&[2, 4, 1])],
            "weight_scale",
        ),
        (vec![blocks(&[2, 6, 1, 16])], "weight_scale"),
        (
            vec![blocks(&[1 << 40, 0, 1, 16])],
            "elements for each expert",
        ),
    ] {
        let error = Model::new(config.clone(), &tensors).open().expect_err(part);
        assert!(error.to_string().contains(part), "{error}");
    }
}
