//! Where a configuration is, and what the files of a model are called.

use super::*;

#[test]
fn configurations_of_text_models_and_old_ones() {
    let static_inputs = json!({"quant_method": "fp8", "activation_scheme": "static"});
    let args = json!({"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true, "dynamic": false});
    let group = json!({"targets": ["Linear"], "weights": args, "input_activations": null});
    // Without a method: the key says which it is.
    let old = json!({"format": "float-quantized", "quantization_status": "frozen", "config_groups": {"group_0": group},
        "ignore": ["lm_head"]});
    let by_row = expected(N, K, |row, _| scales(N)[row]);
    for (case, config, scale, input, family, kind, values) in [
        (
            "in the text model",
            json!({"model_type": "llava", "text_config": {"quantization_config": static_inputs}}),
            floats("fc.weight_scale", &[], &[0.02]),
            Some(floats("fc.act_scale", &[], &[0.5])),
            FamilyName::AUTO_FP8,
            "Static",
            expected(N, K, |_, _| 0.02),
        ),
        (
            "compression_config",
            json!({"model_type": "llama", "compression_config": old}),
            floats("fc.weight_scale", &[N, 1], &scales(N)),
            None,
            FamilyName::COMPRESSED_TENSORS,
            "None",
            by_row,
        ),
    ] {
        let tensors: Vec<Entry> = [weight("fc.weight", N, K), scale]
            .into_iter()
            .chain(input)
            .collect();
        let model = Model::new(Some(config), &tensors);
        let checkpoint = opened(case, &model);
        check(case, &checkpoint, "fc", family, kind, &values);
        assert!(checkpoint.other_names().is_empty(), "{case}");
    }
}

/// Its configuration says nothing about quantization, and some of these models have a scale for each row as a vector.
#[test]
fn files_of_diffusion_models() {
    const NAME: &str = "diffusion_pytorch_model.safetensors";
    let path = "transformer_blocks.0.attn.to_q";
    let tensors = [
        weight(&format!("{path}.weight"), N, K),
        floats(&format!("{path}.weight_scale"), &[N], &scales(N)),
        floats(&format!("{path}.bias"), &[N], &scales(N)),
    ];
    let values = expected(N, K, |row, _| scales(N)[row]);
    for in_two in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let config = json!({"_class_name": "FluxTransformer2DModel"});
        fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        match in_two {
            true => split(dir.path(), &tensors, HashMap::new(), NAME),
            false => write(&dir.path().join(NAME), &tensors, None),
        }
        // Another file does not make it unclear which is the model.
        let other = dir.path().join("adapter.safetensors");
        write(&other, &[floats("x", &[1], &[1.])], None);
        let checkpoint = Checkpoint::open_dir(dir.path()).unwrap();
        let family = FamilyName::BY_SHAPE;
        check(NAME, &checkpoint, path, family, TOKEN, &values);
        assert_eq!(checkpoint.other_names(), [format!("{path}.bias")]);
    }
}
