//! Files that contradict themselves, and experts in one tensor.

use super::*;

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
    let row = 11i32;
    let scale = 2f64.powi(120 + row % 8 - 127);
    let expected = |column: i32| {
        let byte = row * 16 + column / 2;
        (e2m1((byte >> (column % 2 * 4) & 0xF) as u8) * scale) as f32
    };
    assert_eq!(up[2 * 32..], (0..32).map(expected).collect::<Vec<_>>());
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
