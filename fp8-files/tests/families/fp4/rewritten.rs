//! Layers with FP4 weights, and what they become in FP8.

use super::*;

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
        assert!(close > 110., "{name}: {close} dB");
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
