//! Quantizing a model: the layers, scales and lists of the result.

use crate::helpers::*;
use candle_core::{DType, Device, Tensor};
use fp8_core::Granularity;
use fp8_files::rewrite::{self, QuantizeOptions, Scheme, Spelling, WriteReport};
use fp8_files::{Error, Result};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;

fn quantize(from: &Path, to: &Path, options: &QuantizeOptions) -> Result<WriteReport> {
    rewrite::quantize(&open(from), to, options, &mut rewrite::quiet)
}

fn linears() -> Vec<String> {
    let layer = |i| {
        let own = ["mlp.down_proj", "mlp.up_proj", "self_attn.q_proj"];
        own.map(|own| format!("model.layers.{i}.{own}"))
    };
    [layer(0), layer(1)].concat()
}

#[test]
fn every_scheme_is_read_back_and_close_to_the_weights() {
    let dir = dir();
    let plain = dir.path().join("plain");
    plain_model(&plain, (128, 256), false, DType::F32);
    let source = open(&plain);
    let amaxes: BTreeMap<String, f32> = linears().into_iter().map(|path| (path, 3.5)).collect();
    let cases = [
        (
            Scheme::StaticTensor,
            vec![
                Spelling::CompressedTensors,
                Spelling::AutoFp8,
                Spelling::ModelOpt,
            ],
        ),
        (Scheme::DynamicTensor, vec![Spelling::CompressedTensors]),
        (
            Scheme::TensorToken,
            vec![Spelling::CompressedTensors, Spelling::AutoFp8],
        ),
        (
            Scheme::ChannelToken,
            vec![Spelling::CompressedTensors, Spelling::ModelOpt],
        ),
        (
            Scheme::Block128,
            vec![Spelling::CompressedTensors, Spelling::Fp8Blocks],
        ),
        (
            Scheme::Mxfp8,
            vec![Spelling::CompressedTensors, Spelling::ModelOpt],
        ),
        (
            "weight-only".parse().unwrap(),
            vec![Spelling::CompressedTensors],
        ),
        (
            "weight-only:mx".parse().unwrap(),
            vec![Spelling::CompressedTensors],
        ),
    ];
    for (scheme, spellings) in cases {
        for spelling in spellings {
            let to = dir
                .path()
                .join(format!("{scheme}-{spelling}").replace(':', "-"));
            let options = QuantizeOptions::new(scheme)
                .with_spelling(spelling)
                .with_input_amaxes(amaxes.clone());
            let report = quantize(&plain, &to, &options).unwrap();
            assert_eq!(report.quantized, linears(), "{scheme} {spelling}");
            let ignored = [
                "lm_head",
                "model.layers.0.mlp.gate",
                "model.layers.1.mlp.gate",
            ];
            assert_eq!(report.ignored, ignored, "{scheme} {spelling}");
            let again = open(&to);
            assert_eq!(again.layer_paths(), linears());
            for path in linears() {
                let layer = again.stored_layer(&path, &CPU).unwrap();
                let weight = source.tensor(&format!("{path}.weight"), &CPU).unwrap();
                let value = layer.codes.dequantize(DType::F32).unwrap();
                let sum = |x: &Tensor| {
                    x.sqr()
                        .unwrap()
                        .sum_all()
                        .unwrap()
                        .to_scalar::<f32>()
                        .unwrap()
                };
                let noise = sum(&(value - &weight).unwrap()) / sum(&weight);
                // Three bits of mantissa: errors of at most half a step, 1/16; their mean square is 1/12 of a step squared.
                assert!(noise < 1.2e-3, "{scheme} {spelling} {path}: {noise}");
                let shown = facts(&layer).input;
                match scheme {
                    Scheme::StaticTensor => {
                        assert_eq!(shown, format!("static {:?}", [(3.5f32 / 448.).to_bits()]));
                    }
                    Scheme::WeightOnly { .. } => assert_eq!(shown, "None"),
                    _ => assert!(shown.starts_with("Dynamic"), "{shown}"),
                }
            }
            assert!(names_in(&to).contains(&"tokenizer.json".to_string()));
            assert!(!names_in(&to).contains(&"README.md".to_string()));
        }
    }
}

#[test]
fn a_static_scheme_without_an_amax_names_the_layer() {
    let dir = dir();
    let plain = dir.path().join("plain");
    plain_model(&plain, (64, 64), false, DType::F32);
    let options = QuantizeOptions::new(Scheme::StaticTensor);
    let error = quantize(&plain, &dir.path().join("out"), &options).unwrap_err();
    assert!(
        matches!(&error, Error::MissingAmax { path } if path.ends_with("proj")),
        "{error}"
    );
    assert_eq!(names_in(dir.path()), ["plain"]);
}

#[test]
fn ignored_layers_stay_and_unmatched_patterns_are_reported() {
    let dir = dir();
    let (plain, to) = (dir.path().join("plain"), dir.path().join("out"));
    plain_model(&plain, (64, 96), false, DType::BF16);
    let options = QuantizeOptions::new(Scheme::ChannelToken).with_ignore([
        "*.down_proj",
        "re:model\\.layers\\.1\\.",
        "model.layers.9.mlp.up_proj",
    ]);
    let report = quantize(&plain, &to, &options).unwrap();
    assert_eq!(
        report.quantized,
        [
            "model.layers.0.mlp.up_proj",
            "model.layers.0.self_attn.q_proj"
        ]
    );
    assert_eq!(report.unmatched, ["model.layers.9.mlp.up_proj"]);
    let config = json_file(to.join("config.json"));
    assert_eq!(config["dtype"], "bfloat16");
    let ignored = config["quantization_config"]["ignore"].as_array().unwrap();
    assert_eq!(ignored.len(), 7, "{ignored:?}");
    // All of them are listed, so that the file can be loaded.
    assert_eq!(open(&to).layer_paths(), report.quantized);
    let again = quantize(
        &plain,
        &dir.path().join("x"),
        &QuantizeOptions::default().with_ignore(["*"]),
    );
    assert!(matches!(again, Err(Error::NothingToConvert)));
    let bad = quantize(
        &plain,
        &dir.path().join("x"),
        &QuantizeOptions::default().with_ignore(["re:("]),
    );
    assert!(matches!(bad, Err(Error::Malformed(_))), "{bad:?}");
}

#[test]
fn a_quantized_tied_head_gets_its_own_weight() {
    let dir = dir();
    let (plain, to) = (dir.path().join("plain"), dir.path().join("out"));
    plain_model(&plain, (64, 96), true, DType::F32);
    let options = QuantizeOptions::new(Scheme::ChannelToken);
    let report = quantize(&plain, &dir.path().join("tied"), &options).unwrap();
    assert!(report.ignored.contains(&"lm_head".to_string()));
    let config = json_file(dir.path().join("tied/config.json"));
    assert_eq!(config["tie_word_embeddings"], true);

    let report = quantize(&plain, &to, &options.with_head(true)).unwrap();
    assert!(report.quantized.contains(&"lm_head".to_string()));
    let config = json_file(to.join("config.json"));
    assert_eq!(config["tie_word_embeddings"], false);
    let targets = &config["quantization_config"]["config_groups"]["group_0"]["targets"];
    assert_eq!(*targets, json!(["Linear", "lm_head"]));
    let again = open(&to);
    let head = again.stored_layer("lm_head", &CPU).unwrap();
    let embedding = again.tensor("model.embed_tokens.weight", &CPU).unwrap();
    let before = open(&plain)
        .tensor("model.embed_tokens.weight", &CPU)
        .unwrap();
    assert_eq!(bits(&embedding), bits(&before));
    let difference = (head.codes.dequantize(DType::F32).unwrap() - embedding).unwrap();
    assert!(
        difference
            .abs()
            .unwrap()
            .max_all()
            .unwrap()
            .to_scalar::<f32>()
            .unwrap()
            <= 1. / 16.
    );
}

#[test]
fn ragged_and_empty_blocks_come_back_as_they_were() {
    let dir = dir();
    let plain = dir.path().join("plain");
    std::fs::create_dir(&plain).unwrap();
    // 300 rows: two blocks and a part. A block of zeros has a scale other than 0.
    let w = tensor(3, &[300, 256]);
    let mask = Tensor::cat(
        &[
            Tensor::zeros((128, 256), DType::F32, &CPU).unwrap(),
            Tensor::ones((172, 256), DType::F32, &CPU).unwrap(),
        ],
        0,
    );
    let w = (w * mask.unwrap()).unwrap();
    let tensors = [("a.fc.weight", w.clone())].into();
    candle_core::safetensors::save(&tensors, plain.join("model.safetensors")).unwrap();
    let mut seen = vec![];
    for spelling in [Spelling::CompressedTensors, Spelling::Fp8Blocks] {
        let to = dir.path().join(spelling.to_string());
        let options = QuantizeOptions::new(Scheme::Block128).with_spelling(spelling);
        quantize(&plain, &to, &options).unwrap();
        let layer = open(&to).stored_layer("a.fc", &CPU).unwrap();
        assert_eq!(layer.codes.dequant_scale().dims(), [3, 2]);
        let value = layer.codes.dequantize(DType::F32).unwrap();
        let zeros = value.narrow(0, 0, 128).unwrap().abs().unwrap();
        assert_eq!(zeros.max_all().unwrap().to_scalar::<f32>().unwrap(), 0.);
        seen.push(facts(&layer));
    }
    assert_eq!(seen[0], seen[1]);
    // Inputs do not divide into groups of 128.
    let tensors = [("fc.weight", tensor(1, &[128, 200]))].into();
    candle_core::safetensors::save(&tensors, plain.join("model.safetensors")).unwrap();
    let options = QuantizeOptions::new(Scheme::Block128);
    let error = quantize(&plain, &dir.path().join("x"), &options).unwrap_err();
    for part in ["`fc`", "200", "--ignore"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    let granularity = Granularity::Blockwise {
        rows: 128,
        cols: 128,
    };
    let weight_only = QuantizeOptions::new(Scheme::WeightOnly { granularity });
    quantize(&plain, &dir.path().join("y"), &weight_only).unwrap();
    assert_eq!(open(dir.path().join("y")).layer_paths(), ["fc"]);
}

/// Encoders come with and without a pooler, and other engines create one that is not in the file.
#[test]
fn the_pooler_of_an_encoder_is_ignored_by_name() {
    for (root, has_pooler) in [("", false), ("bert.", false), ("", true)] {
        let dir = dir();
        let plain = dir.path().join("plain");
        std::fs::create_dir(&plain).unwrap();
        let pooler = format!("{root}pooler.dense");
        let layer = format!("{root}encoder.layer.0.output.dense");
        let table = format!("{root}embeddings.word_embeddings.weight");
        let mut tensors = std::collections::HashMap::from([
            (table, tensor(1, &[32, 64])),
            (format!("{layer}.weight"), tensor(2, &[64, 64])),
        ]);
        if has_pooler {
            tensors.insert(format!("{pooler}.weight"), tensor(3, &[64, 64]));
        }
        candle_core::safetensors::save(&tensors, plain.join("model.safetensors")).unwrap();
        let options = QuantizeOptions::new(Scheme::ChannelToken);
        let report = quantize(&plain, &dir.path().join("out"), &options).unwrap();
        assert_eq!(report.ignored.contains(&pooler), !has_pooler, "{root}");
        assert_eq!(report.quantized.contains(&pooler), has_pooler, "{root}");
    }
}

#[test]
fn a_weight_that_is_not_finite_is_named() {
    let dir = dir();
    let plain = dir.path().join("plain");
    std::fs::create_dir(&plain).unwrap();
    let w = Tensor::new(&[[1f32, 2.], [f32::NAN, 4.]], &Device::Cpu).unwrap();
    candle_core::safetensors::save(&[("fc.weight", w)].into(), plain.join("model.safetensors"))
        .unwrap();
    let error = quantize(&plain, &dir.path().join("out"), &QuantizeOptions::default()).unwrap_err();
    assert!(
        matches!(&error, Error::TensorValue { index: 2, .. }),
        "{error}"
    );
    assert_eq!(names_in(dir.path()), ["plain"]);
}

/// FP8 to FP8, dequantized in between.
#[test]
fn an_fp8_source_is_quantized_again() {
    let dir = dir();
    let to = dir.path().join("out");
    let options = QuantizeOptions::new(Scheme::ChannelToken);
    let report = quantize(&golden("ct_static_tensor"), &to, &options).unwrap();
    assert_eq!(report.quantized.len(), 14);
    assert_eq!(report.requantized, report.quantized);
    let layer = open(&to).stored_layer(&report.quantized[0], &CPU).unwrap();
    assert_eq!(layer.codes.granularity(), Granularity::Rowwise);
}

/// Scales of rows whose largest code is not the largest number would change if the values were rounded again.
#[test]
fn codes_of_the_same_granularity_are_kept() {
    let schemes = [
        Scheme::ChannelToken,
        Scheme::TensorToken,
        Scheme::Block128,
        Scheme::Mxfp8,
    ];
    for scheme in schemes {
        let dir = dir();
        let [plain, once, again] = ["plain", "once", "again"].map(|name| dir.path().join(name));
        plain_model(&plain, (128, 256), false, DType::F32);
        let options = QuantizeOptions::new(scheme);
        let first = quantize(&plain, &once, &options).unwrap();
        // Scales twice as large as needed: nothing but a copy has them again.
        let file = once.join("model.safetensors");
        let mut tensors = candle_core::safetensors::load(&file, &CPU).unwrap();
        for (name, tensor) in &mut tensors {
            if name.ends_with("weight_scale") && tensor.dtype() != DType::U8 {
                *tensor = (tensor.to_dtype(DType::F32).unwrap() * 2.).unwrap();
            }
        }
        candle_core::safetensors::save(&tensors, &file).unwrap();
        let second = quantize(&once, &again, &options).unwrap();
        assert_eq!(second.quantized, first.quantized, "{scheme}");
        assert!(second.requantized.is_empty(), "{scheme}");
        assert_eq!(second.requantization_error, None, "{scheme}");
        let parts = |path: &Path, layer: &str| {
            let codes = open(path).stored_layer(layer, &CPU).unwrap().codes;
            let scales = codes.dequant_scale().flatten_all().unwrap();
            (
                codes
                    .codes()
                    .flatten_all()
                    .unwrap()
                    .to_vec1::<u8>()
                    .unwrap(),
                scales.to_vec1::<f32>().unwrap(),
            )
        };
        for layer in &first.quantized {
            assert!(
                parts(&once, layer) == parts(&again, layer),
                "{scheme}: {layer}"
            );
        }
    }
}

#[test]
fn an_fp8_head_stays_fp8_and_only_fp8_layers_are_reported_as_requantized() {
    let dir = dir();
    let (plain, once, again) = (
        dir.path().join("plain"),
        dir.path().join("once"),
        dir.path().join("again"),
    );
    plain_model(&plain, (64, 96), false, DType::F32);
    let kept = "model.layers.0.mlp.up_proj";
    let options = QuantizeOptions::new(Scheme::TensorToken);
    let with_head = options.with_head(true).with_ignore([kept]);
    let report = quantize(&plain, &once, &with_head).unwrap();
    assert!(report.requantized.is_empty());
    let by_channel = QuantizeOptions::new(Scheme::ChannelToken);
    let report = quantize(&once, &again, &by_channel).unwrap();
    let mut rounded = report.quantized.clone();
    assert!(rounded.contains(&"lm_head".to_string()));
    rounded.retain(|path| path != kept);
    assert_eq!(report.requantized, rounded);
    assert_eq!(report.requantized.len() + 1, report.quantized.len());
    assert!(open(&again).layer_paths().contains(&"lm_head".to_string()));
}
