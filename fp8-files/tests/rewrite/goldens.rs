//! Files of other libraries, converted to each spelling that can hold them, and back.

use crate::helpers::*;
use fp8_core::Granularity;
use fp8_files::Error;
use fp8_files::load::{Checkpoint, Inputs, OpenOptions};
use fp8_files::rewrite::{self, Spelling, WriteOptions};
use serde_json::json;
use std::path::Path;

use Spelling::{AutoFp8, CompressedTensors, Fp8Blocks, ModelOpt};

/// Every folder, and the spellings that can hold its model.
const FAMILIES: [(&str, &[Spelling]); 10] = [
    ("ct_static_tensor", &[CompressedTensors, AutoFp8, ModelOpt]),
    ("ct_channel_token_bf16", &[CompressedTensors, ModelOpt]),
    ("ct_block128", &[CompressedTensors, Fp8Blocks]),
    ("hf_block_f32", &[CompressedTensors, Fp8Blocks]),
    (
        "hf_per_tensor_static",
        &[CompressedTensors, AutoFp8, ModelOpt],
    ),
    ("autofp8_static", &[CompressedTensors, AutoFp8, ModelOpt]),
    ("modelopt_fp8_kv", &[CompressedTensors, ModelOpt]),
    ("modelopt_pb_wo", &[CompressedTensors, ModelOpt]),
    ("torchao_row", &[CompressedTensors, ModelOpt]),
    ("torchao_tensor", &[CompressedTensors]),
];

fn convert(checkpoint: &Checkpoint, to: &Path, spelling: Spelling) -> fp8_files::Result<()> {
    let options = WriteOptions::new();
    rewrite::convert(checkpoint, to, spelling, &options, &mut rewrite::quiet).map(|_| ())
}

#[test]
fn every_family_converts_to_every_spelling_that_can_hold_it() {
    for (family, able) in FAMILIES {
        let source = open_golden(family);
        let (layers, rest) = (all_facts(&source), others(&source));
        assert_eq!(layers.len(), 14, "{family}");
        for spelling in Spelling::ALL {
            let dir = dir();
            let to = dir.path().join("out");
            let result = convert(&source, &to, spelling);
            if !able.contains(&spelling) {
                let error = result.unwrap_err();
                let Error::Inexpressible { layer, takes, .. } = &error else {
                    panic!("{family} to {spelling}: {error:?}");
                };
                assert!(!layer.is_empty() && !takes.is_empty(), "{error}");
                assert!(names_in(dir.path()).is_empty(), "{family} to {spelling}");
                continue;
            }
            result.unwrap_or_else(|e| panic!("{family} to {spelling}: {e}"));
            let again = open(&to);
            assert!(
                all_facts(&again) == layers,
                "{family} to {spelling}: layers"
            );
            assert!(
                others(&again) == rest,
                "{family} to {spelling}: other tensors"
            );
            // And back through the spelling that can hold the most.
            let back = dir.path().join("back");
            convert(&again, &back, CompressedTensors).unwrap();
            assert!(
                all_facts(&open(&back)) == layers,
                "{family} by {spelling} and back"
            );
        }
    }
}

#[test]
fn configurations_keep_the_rest_and_list_what_is_not_quantized() {
    let source = open_golden("ct_static_tensor");
    let before = json_file(golden("ct_static_tensor").join("config.json"));
    for spelling in [CompressedTensors, AutoFp8, ModelOpt] {
        let dir = dir();
        let to = dir.path().join("out");
        convert(&source, &to, spelling).unwrap();
        let mut config = json_file(to.join("config.json"));
        let quantization = config["quantization_config"].take();
        config["quantization_config"] = before["quantization_config"].clone();
        assert_eq!(config, before, "{spelling}");
        let key = match spelling {
            AutoFp8 => "ignored_layers",
            _ => "ignore",
        };
        assert_eq!(quantization[key], json!(["lm_head"]), "{spelling}");
    }
}

#[test]
fn scales_have_the_names_and_shapes_of_the_family() {
    const PATH: &str = "model.layers.0.self_attn.q_proj";
    let cases: [(&str, Spelling, &str, &[usize]); 7] = [
        ("ct_static_tensor", CompressedTensors, "weight_scale", &[1]),
        ("ct_static_tensor", AutoFp8, "weight_scale", &[]),
        ("ct_static_tensor", ModelOpt, "input_scale", &[]),
        ("ct_channel_token_bf16", ModelOpt, "weight_scale", &[192]),
        (
            "ct_channel_token_bf16",
            CompressedTensors,
            "weight_scale",
            &[192, 1],
        ),
        ("ct_block128", Fp8Blocks, "weight_scale_inv", &[2, 2]),
        ("modelopt_pb_wo", ModelOpt, "weight_scale", &[2, 1, 2, 1]),
    ];
    for (family, spelling, own, dims) in cases {
        let dir = dir();
        let to = dir.path().join("out");
        convert(&open_golden(family), &to, spelling).unwrap();
        let stored = candle_core::safetensors::load(to.join("model.safetensors"), &CPU).unwrap();
        let scale = &stored[&format!("{PATH}.{own}")];
        assert_eq!(scale.dims(), dims, "{family} as {spelling}");
        assert_eq!(scale.dtype(), candle_core::DType::F32);
    }
}

/// Weight-only blocks opened with groups of 128 inputs can be converted to a family that declares them.
#[test]
fn input_groups_that_engines_assume_can_be_declared() {
    let options = OpenOptions::new().with_inputs(Inputs::Groups(128));
    let source = Checkpoint::open_dir_with(golden("modelopt_pb_wo"), &options).unwrap();
    let dir = dir();
    let to = dir.path().join("out");
    convert(&source, &to, Fp8Blocks).unwrap();
    assert!(all_facts(&open(&to)) == all_facts(&source));
    let quantization = &json_file(to.join("config.json"))["quantization_config"];
    assert_eq!(quantization["weight_block_size"], json!([128, 128]));
}

/// Input scales that are powers of two become exact where the target's configuration has no key for them.
#[test]
fn power_of_two_inputs_become_exact_unless_the_target_declares_them() {
    const KEY: &str = "fp8_power_of_two_inputs";
    let dir = dir();
    let from = dir.path().join("from");
    std::fs::create_dir(&from).unwrap();
    let golden = golden("hf_block_f32");
    let mut config = json_file(golden.join("config.json"));
    config["quantization_config"]["scale_fmt"] = json!("ue8m0");
    std::fs::write(from.join("config.json"), config.to_string()).unwrap();
    let model = "model.safetensors";
    std::fs::copy(golden.join(model), from.join(model)).unwrap();
    let source = open(&from);
    let to = |name: &str| dir.path().join(name);
    let (usual, asked) = (
        WriteOptions::new(),
        WriteOptions::new().with_power_of_two_inputs(true),
    );
    let convert = |to: &Path, spelling, options: &WriteOptions| {
        rewrite::convert(&source, to, spelling, options, &mut rewrite::quiet).unwrap()
    };

    let report = convert(&to("blocks"), Fp8Blocks, &usual);
    assert!(report.exact_inputs.is_empty());
    assert!(all_facts(&open(to("blocks"))) == all_facts(&source));

    let report = convert(&to("exact"), CompressedTensors, &usual);
    assert_eq!(report.exact_inputs, report.quantized);
    let exact = open(to("exact"));
    assert_eq!(exact.metadata(KEY), None);
    assert!(all_facts(&exact) == all_facts(&open_golden("hf_block_f32")));

    let report = convert(&to("private"), CompressedTensors, &asked);
    assert!(report.exact_inputs.is_empty());
    let private = open(to("private"));
    assert!(private.metadata(KEY).is_some());
    assert!(all_facts(&private) == all_facts(&source));
}

#[test]
fn scales_of_caches_get_the_names_of_the_family_or_are_dropped_on_request() {
    let source = open_golden("modelopt_fp8_kv");
    let dir = dir();
    for (spelling, key) in [
        (CompressedTensors, "model.layers.0.self_attn.k_scale"),
        (ModelOpt, "model.layers.0.self_attn.k_proj.k_scale"),
    ] {
        let to = dir.path().join(spelling.to_string());
        convert(&source, &to, spelling).unwrap();
        let stored = candle_core::safetensors::load(to.join("model.safetensors"), &CPU).unwrap();
        assert!(stored.contains_key(key), "{spelling}");
    }
    // Keys and values have different scales here, but AutoFP8 has one for both.
    let to = dir.path().join("autofp8");
    let error = convert(&source, &to, AutoFp8).unwrap_err();
    assert!(
        error.to_string().contains("one number for keys and values"),
        "{error}"
    );
    let options = WriteOptions::new().with_drop_kv_scales(true);
    rewrite::convert(&source, &to, AutoFp8, &options, &mut rewrite::quiet).unwrap();
    assert!(all_facts(&open(&to)) == all_facts(&source));
    let names = open(&to).other_names();
    assert!(!names.iter().any(|name| name.ends_with("_scale")));
}

#[test]
fn dequantized_is_code_times_scale() {
    for (family, _) in FAMILIES {
        let source = open_golden(family);
        let dir = dir();
        let to = dir.path().join("out");
        let dtype = candle_core::DType::F32;
        let options = WriteOptions::new();
        rewrite::dequantize(&source, &to, dtype, &options, &mut rewrite::quiet).unwrap();
        let plain = open(&to);
        assert!(plain.layer_paths().is_empty(), "{family}");
        assert!(
            json_file(to.join("config.json"))
                .get("quantization_config")
                .is_none()
        );
        let expected = golden(family).join("expected.safetensors");
        let expected = candle_core::safetensors::load(expected, &CPU).unwrap();
        let mut compared = 0;
        for (name, rows) in &expected {
            let Some(path) = name.strip_suffix(".dequant") else {
                continue;
            };
            let value = plain.tensor(&format!("{path}.weight"), &CPU).unwrap();
            let value = value.narrow(0, 0, rows.dims()[0]).unwrap();
            assert_eq!(bits(&value), bits(rows), "{family} {path}");
            compared += 1;
        }
        assert_eq!(compared, 14, "{family}");
    }
}

/// Without a requested dtype only FP8 weights change.
#[test]
fn high_precision_is_only_rounded_on_request() {
    use candle_core::DType;
    let dir = dir();
    let (plain, fp8) = (dir.path().join("plain"), dir.path().join("fp8"));
    plain_model(&plain, (64, 96), false, DType::F32);
    let mut tensors =
        candle_core::safetensors::load(plain.join("model.safetensors"), &CPU).unwrap();
    for (name, tensor) in &mut tensors {
        if name.ends_with("proj.weight") {
            *tensor = tensor.to_dtype(DType::BF16).unwrap();
        }
    }
    candle_core::safetensors::save(&tensors, plain.join("model.safetensors")).unwrap();
    let options = rewrite::QuantizeOptions::default();
    rewrite::quantize(&open(&plain), &fp8, &options, &mut rewrite::quiet).unwrap();
    for (at, from) in [&plain, &fp8].into_iter().enumerate() {
        let (source, to) = (open(from), dir.path().join(format!("to{at}")));
        let options = WriteOptions::new();
        rewrite::dequantize(&source, &to, None, &options, &mut rewrite::quiet).unwrap();
        let written = open(&to);
        for (name, before) in &tensors {
            let after = written.tensor(name, &CPU).unwrap();
            if rewrite::Source::is_fp8(&source, name) {
                assert_eq!(after.dtype(), DType::F32, "{name}");
                continue;
            }
            assert_eq!(after.dtype(), before.dtype(), "{name}");
            assert_eq!(bits(&after), bits(before), "{name}");
        }
    }
}

#[test]
fn the_golden_of_blocks_has_blocks_of_128() {
    let layer = open_golden("ct_block128");
    let layer = layer
        .stored_layer("model.layers.1.mlp.down_proj", &CPU)
        .unwrap();
    let block = Granularity::Blockwise {
        rows: 128,
        cols: 128,
    };
    assert_eq!(layer.codes.granularity(), block);
}

/// Scales of queries and probabilities do not belong to a model in high precision, and few families can hold them.
#[test]
fn scales_of_attention_are_written_where_the_family_can_hold_them() {
    const NAMES: [&str; 2] = ["q_scale", "prob_output_scale"];
    let dir = dir();
    let from = dir.path().join("from");
    std::fs::create_dir(&from).unwrap();
    let golden = golden("ct_static_tensor");
    let mut tensors =
        candle_core::safetensors::load(golden.join("model.safetensors"), &CPU).unwrap();
    let name = |own: &str| format!("model.layers.0.self_attn.{own}");
    for own in NAMES {
        let scale = candle_core::Tensor::new(&[0.75f32], &CPU).unwrap();
        tensors.insert(name(own), scale);
    }
    candle_core::safetensors::save(&tensors, from.join("model.safetensors")).unwrap();
    std::fs::copy(golden.join("config.json"), from.join("config.json")).unwrap();
    let source = open(&from);

    let to = dir.path().join("kept");
    convert(&source, &to, CompressedTensors).unwrap();
    assert_eq!(open(&to).other_names(), source.other_names());
    for own in NAMES {
        let kept = open(&to).tensor(&name(own), &CPU).unwrap();
        assert_eq!(kept.to_vec1::<f32>().unwrap(), [0.75]);
    }
    let has_none = |to: &std::path::Path| {
        let names = open(to).other_names();
        !names
            .iter()
            .any(|other| NAMES.iter().any(|own| *other == name(own)))
    };
    let options = WriteOptions::new().with_drop_kv_scales(true);
    for spelling in [AutoFp8, ModelOpt, CompressedTensors] {
        let to = dir.path().join(spelling.to_string());
        if spelling != CompressedTensors {
            let error = convert(&source, &to, spelling).unwrap_err();
            assert!(
                matches!(error, fp8_files::Error::Inexpressible { .. }),
                "{error}"
            );
            let text = error.to_string();
            assert!(
                text.contains("layers.0.self_attn") && text.contains("_scale`"),
                "{text}"
            );
        }
        rewrite::convert(&source, &to, spelling, &options, &mut rewrite::quiet).unwrap();
        assert!(has_none(&to), "{spelling}");
    }
    let to = dir.path().join("plain");
    let (dtype, options) = (candle_core::DType::BF16, WriteOptions::new());
    rewrite::dequantize(&source, &to, dtype, &options, &mut rewrite::quiet).unwrap();
    assert!(has_none(&to));
}

/// Mistral's own files lack the architecture that a `config.json` has to name.
#[test]
fn mistrals_own_files_need_a_config() {
    let dir = dir();
    let from = dir.path().join("from");
    std::fs::create_dir(&from).unwrap();
    let params = json!({"n_heads": 2, "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "NO_SCALES"}});
    std::fs::write(from.join("params.json"), params.to_string()).unwrap();
    let one = candle_core::Tensor::ones(1, candle_core::DType::F32, &CPU).unwrap();
    let codes = candle_core::Tensor::zeros((8, 8), candle_core::DType::F8E4M3, &CPU).unwrap();
    let tensors = std::collections::HashMap::from([
        ("layers.0.attention.wq.weight", codes),
        ("layers.0.attention.wq.qscale_weight", one),
    ]);
    candle_core::safetensors::save(&tensors, from.join("consolidated.safetensors")).unwrap();
    let source = open(&from);
    let to = dir.path().join("to");
    let (dtype, options) = (candle_core::DType::BF16, WriteOptions::new());
    let dequantized = rewrite::dequantize(&source, &to, dtype, &options, &mut rewrite::quiet);
    for error in [
        convert(&source, &to, CompressedTensors).unwrap_err(),
        dequantized.unwrap_err(),
    ] {
        assert!(
            matches!(error, fp8_files::Error::MissingConfig { .. }),
            "{error}"
        );
        assert!(error.to_string().contains("`model_type`"), "{error}");
        assert!(!to.exists());
    }
}
