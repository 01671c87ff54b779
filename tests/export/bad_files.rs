//! Hand-made files, good and bad, through our VarBuilder and candle's.

use crate::net::*;
use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;
use fp8::fp8_candle::Fp8Tensor;
use fp8::fp8_core::{Contraction, Granularity};
use fp8::load::{Checkpoint, var_builder};
use fp8::nn::{self, InputScaling, Linear};
use fp8::{FilesError, save_calibrated};
use fp8_test_support::files::{codes, f32s, write};
use fp8_test_support::{
    assert_same, assert_text, delayed, device, flat, of, skipped_on_cuda, values,
};
use safetensors::Dtype;
use std::fs;
use std::path::Path;

/// The layer `fc` of shape `[4, 6]` as our VarBuilder and as candle's loads it from a file, or the text of the error.
fn build(path: &Path) -> [Result<Linear, String>; 2] {
    let layer = |vb: VarBuilder<'_>| {
        nn::linear_no_bias(6, 4, vb.pp("fc")).map_err(|error| error.to_string())
    };
    let ours = match var_builder(&[path], DType::F32, &device()) {
        Ok(vb) => layer(vb),
        Err(error) => Err(error.to_string()),
    };
    [ours, layer(candle_var_builder(path, DType::F32))]
}

#[test]
fn a_hand_made_file_loads_through_both_var_builders() {
    let dir = dir();
    let path = dir.path().join("model.safetensors");
    let codes = codes(24);
    let shapes: [(&[usize], usize); 5] =
        [(&[1], 1), (&[], 1), (&[1, 1], 1), (&[4, 1], 4), (&[4], 4)];
    for (shape, scales) in shapes {
        let scale: Vec<f32> = (1..=scales).map(|i| i as f32 * 0.01).collect();
        write(
            &path,
            &[
                ("fc.weight", Dtype::F8_E4M3, &[4, 6], &codes),
                ("fc.weight_scale", Dtype::F32, shape, &f32s(&scale)),
                ("fc.input_scale", Dtype::F32, &[], &f32s(&[0.02])),
            ],
        );
        let value = Fp8Tensor::from_parts(
            Tensor::from_slice(&codes, (4, 6), &device()).unwrap(),
            fp8::fp8_core::Format::E4M3,
            if scales == 1 {
                Granularity::Tensorwise
            } else {
                Granularity::Rowwise
            },
            Contraction::Cols,
            of(&scale, &[scales]),
        )
        .unwrap()
        .dequantize(DType::F32)
        .unwrap();
        for (name, layer) in ["ours", "candle's"].iter().zip(build(&path)) {
            let layer = layer.unwrap();
            let weight = layer.static_weight().unwrap();
            let case = format!("{name}, scale {shape:?}");
            assert_same(
                &case,
                &weight.codes().dequantize(DType::F32).unwrap(),
                &value,
            );
            let InputScaling::Static(input) = weight.input_scaling() else {
                panic!("{case}: the input scale is static");
            };
            assert_eq!(
                (flat(input), input.dims()),
                (vec![0.02], &[1][..]),
                "{case}"
            );
        }
    }
}

#[test]
fn fp8_tensors_that_do_not_fit_together_are_typed_errors() {
    if skipped_on_cuda("candle 0.11 casts nothing to or from F8E4M3 there") {
        return;
    }
    let dir = dir();
    let path = dir.path().join("model.safetensors");
    let codes = codes(24);
    let (floats, scale) = (f32s(&values(1, 24)), f32s(&[0.01]));
    let three = f32s(&[1., 2., 3.]);
    let weight: (&str, Dtype, &[usize], &[u8]) = ("fc.weight", Dtype::F8_E4M3, &[4, 6], &codes);
    let one: (&str, Dtype, &[usize], &[u8]) = ("fc.weight_scale", Dtype::F32, &[1], &scale);
    type Entry<'a> = (&'a str, Dtype, &'a [usize], &'a [u8]);
    let cases: [(&str, Vec<Entry<'_>>, &[&str]); 6] = [
        (
            "no scale",
            vec![weight],
            &["`fc.weight`", "fc.weight_scale"],
        ),
        (
            "f32 beside a scale",
            vec![("fc.weight", Dtype::F32, &[4, 6], &floats), one],
            &["`fc.weight`", "F8_E4M3"],
        ),
        (
            "three scales for four rows",
            vec![weight, ("fc.weight_scale", Dtype::F32, &[3, 1], &three)],
            &["`fc.weight_scale`", "[3, 1]", "[4, 1]"],
        ),
        (
            "three input scales",
            vec![weight, one, ("fc.input_scale", Dtype::F32, &[3], &three)],
            &["`fc.input_scale`", "[3]", "one element"],
        ),
        (
            "another shape",
            vec![("fc.weight", Dtype::F8_E4M3, &[6, 4], &codes), one],
            &["fc.weight", "[6, 4]", "[4, 6]"],
        ),
        ("no weight", vec![one], &["fc.weight"]),
    ];
    for (case, tensors, parts) in cases {
        write(&path, &tensors);
        for (name, layer) in ["ours", "candle's"].iter().zip(build(&path)) {
            let error = layer.expect_err(&format!("{case}, {name}"));
            assert_text(&format!("{case}, {name}"), error, parts);
        }
    }
    // Our VarBuilder refuses these as soon as the file is opened.
    write(&path, &[weight]);
    let error = Checkpoint::open(&[&path]).unwrap_err();
    assert!(
        matches!(&error, FilesError::MissingScale { tensor, missing, .. }
            if tensor == "fc.weight" && missing == "fc.weight_scale"),
        "{error:?}"
    );
    write(&path, &[("fc.weight", Dtype::F32, &[4, 6], &floats), one]);
    let error = Checkpoint::open(&[&path]).unwrap_err();
    assert!(
        matches!(&error, FilesError::TensorDType { tensor, .. } if tensor == "fc.weight"),
        "{error:?}"
    );
    write(
        &path,
        &[weight, ("fc.weight_scale", Dtype::I32, &[1], &scale)],
    );
    assert_text(
        "an integer scale",
        Checkpoint::open(&[&path]).unwrap_err(),
        &["`fc.weight_scale`", "I32", "F32"],
    );
    let e5m2: Entry<'_> = ("fc.weight", Dtype::F8_E5M2, &[4, 6], &codes);
    write(&path, &[e5m2, one]);
    assert_text(
        "E5M2",
        Checkpoint::open(&[&path]).unwrap_err(),
        &["`fc.weight`", "F8_E5M2"],
    );
}

#[test]
fn missing_tensors_and_other_shapes_are_named() {
    let dir = dir();
    let path = dir.path().join("model.safetensors");
    write(
        &path,
        &[("fc.weight", Dtype::F32, &[4, 6], &f32s(&values(1, 24)))],
    );
    let vb = var_builder(&[&path], DType::F32, &device()).unwrap();
    let error = nn::linear(6, 4, vb.pp("fc")).unwrap_err();
    assert_text("bias", error, &["`fc.bias`", "model.safetensors"]);
    let error = nn::linear_no_bias(6, 4, vb.pp("fd")).unwrap_err();
    assert_text("other path", error, &["`fd.weight`", "model.safetensors"]);
    let error = nn::linear_no_bias(5, 4, vb.pp("fc")).unwrap_err();
    assert_text("other shape", error, &["`fc.weight`", "[4, 6]", "[4, 5]"]);
}

#[test]
fn files_that_are_not_whole_safetensors_files_are_refused() {
    let (_vars, net) = calibrated(delayed(16));
    let dir = dir();
    let good = save_calibrated(&net, dir.path().join("good.safetensors"))
        .unwrap()
        .model;
    let bytes = fs::read(&good).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let with_length = |length: u64| [&length.to_le_bytes()[..], &bytes[8..]].concat();
    let cases: [(&str, Vec<u8>, &str); 10] = [
        ("empty", vec![], "too few"),
        ("seven bytes", bytes[..7].to_vec(), "too few"),
        (
            "header cut",
            bytes[..8 + header / 2].to_vec(),
            "header claims",
        ),
        ("no data", bytes[..8 + header].to_vec(), "truncated"),
        (
            "one byte short",
            bytes[..bytes.len() - 1].to_vec(),
            "truncated",
        ),
        ("one byte more", [&bytes[..], &[0]].concat(), "too long"),
        (
            "appended twice",
            [&bytes[..], &bytes[..]].concat(),
            "too long",
        ),
        (
            "absurd header",
            with_length(u64::MAX),
            "18446744073709551615 bytes",
        ),
        (
            "header past the limit",
            with_length(1 << 40),
            "1099511627776 bytes",
        ),
        (
            "text",
            b"this is not a safetensors file at all\n".to_vec(),
            "header claims",
        ),
    ];
    for (case, content, reason) in cases {
        let path = dir.path().join("bad.safetensors");
        fs::write(&path, content).unwrap();
        let error = Checkpoint::open(&[&path]).unwrap_err();
        assert!(
            matches!(&error, FilesError::NotSafetensors { .. }),
            "{case}: {error:?}"
        );
        assert_text(
            case,
            error,
            &["bad.safetensors", "not a valid safetensors file", reason],
        );
    }
    // A header of the right length that is not JSON.
    let mut scrambled = bytes.clone();
    scrambled[8..8 + header].fill(b'x');
    let path = dir.path().join("bad.safetensors");
    fs::write(&path, scrambled).unwrap();
    let error = Checkpoint::open(&[&path]).unwrap_err();
    assert!(
        matches!(&error, FilesError::NotSafetensors { .. }),
        "{error:?}"
    );

    for path in [
        dir.path().join("absent.safetensors"),
        dir.path().to_path_buf(),
    ] {
        let error = Checkpoint::open(&[&path]).unwrap_err();
        assert!(
            matches!(&error, FilesError::Read { path: p, .. } | FilesError::NotARegularFile { path: p, .. }
                if *p == path),
            "{error:?}"
        );
        assert_text(
            "unreadable",
            error,
            &["cannot read", &path.display().to_string()],
        );
    }
}
