//! Weights that two layers share.

use crate::net::*;
use candle_core::{DType, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::load::Checkpoint;
use fp8::models::{Bert, BertConfig, Llama, LlamaConfig};
use fp8::nn::Linear;
use fp8::rewrite::Spelling;
use fp8::{
    Autocast, ExportOptions, Recipe, fp8_autocast, prepare_fp8, save_calibrated,
    save_calibrated_with,
};
use fp8_test_support::calibrated::{IN, Tied, calibrate, eval, quantization};
use fp8_test_support::{
    assert_same, delayed, device, fill, flat, prepare, skipped_on_cuda, tensor, var,
};
use safetensors::Dtype;
use serde_json::{Value, json};

#[test]
fn a_weight_tied_to_an_embedding_stays_in_high_precision() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let mut model = Tied::new(vb, true);
    fill(&vars, 9);
    let report = prepare(&mut model);
    assert_eq!((report.converted(), report.skipped()), (1, 1), "{report}");
    let reason = "its weight is shared with `embed.weight`, which stays in high precision";
    assert!(report.to_string().contains(reason), "{report}");
    let guard = fp8_autocast(Autocast::new(delayed(4)).calibrating(true)).unwrap();
    model.forward(&ids(0)).unwrap();
    guard.close().unwrap();
    let dir = dir();
    let report = save_calibrated(&model, dir.path()).unwrap();
    assert_eq!(
        (report.quantized, report.ignored),
        (vec!["fc".into()], vec!["head".into()])
    );
    let tensors = contents(&report.model);
    let high_precision = (Dtype::F32, vec![VOCAB, IN]);
    assert_eq!(tensors["embed.weight"], high_precision);
    let head: Vec<_> = tensors.keys().filter(|n| n.starts_with("head")).collect();
    assert_eq!(head, Vec::<&String>::new(), "stored once");
    assert_eq!(
        json_of(&report.config)["quantization_config"]["ignore"],
        json!(["head"])
    );
}

/// The list at `pointer` of a configuration of a calibrated language model with a tied head.
fn left_out(
    model_type: &str,
    recipe: &str,
    spelling: Spelling,
    file: &str,
    pointer: &str,
) -> Value {
    let config = json!({
        "model_type": model_type, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 2, "vocab_size": VOCAB, "tie_word_embeddings": true,
        "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    });
    let config = LlamaConfig::parse("config.json", &config).unwrap();
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let model = Llama::new(&config, vb).unwrap();
    fill(&vars, 3);
    prepare_fp8(&model, &Default::default()).unwrap();
    let recipe: Recipe = recipe.parse().unwrap();
    let guard = fp8_autocast(Autocast::new(recipe).calibrating(true)).unwrap();
    model.forward(&ids(0)).unwrap();
    guard.close().unwrap();
    let dir = dir();
    let options = ExportOptions::new().with_spelling(spelling);
    save_calibrated_with(&model, dir.path(), &options).unwrap();
    json_of(&dir.path().join(file))
        .pointer(pointer)
        .unwrap_or_else(|| panic!("{file} has no {pointer}"))
        .clone()
}

/// Other engines expect a scale for the layer unless it is listed as ignored, and invent one.
#[test]
fn a_head_that_is_the_embedding_is_left_out_by_name_in_every_spelling() {
    let config = "config.json";
    let list = "/quantization_config/ignore";
    for (recipe, spelling, file, pointer) in [
        ("delayed", Spelling::CompressedTensors, config, list),
        (
            "delayed",
            Spelling::AutoFp8,
            config,
            "/quantization_config/ignored_layers",
        ),
        (
            "blockwise",
            Spelling::Fp8Blocks,
            config,
            "/quantization_config/modules_to_not_convert",
        ),
        ("delayed", Spelling::ModelOpt, config, list),
        (
            "delayed",
            Spelling::ModelOpt,
            "hf_quant_config.json",
            "/quantization/exclude_modules",
        ),
    ] {
        let got = left_out("llama", recipe, spelling, file, pointer);
        assert_eq!(got, json!(["lm_head"]), "{spelling}: {file}");
    }
}

/// A model that gives hidden states has no pooler, and so none of its tensors.
#[test]
fn the_pooler_of_an_encoder_is_left_out_by_name() {
    let config = json!({
        "model_type": "bert", "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 2, "vocab_size": VOCAB,
    });
    let config = BertConfig::parse("config.json", &config).unwrap();
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let model = Bert::new(&config, vb).unwrap();
    fill(&vars, 3);
    prepare_fp8(&model, &Default::default()).unwrap();
    let guard = fp8_autocast(Autocast::new(delayed(4)).calibrating(true)).unwrap();
    let mask = ids(0).ones_like().unwrap();
    model.forward(&ids(0), &mask).unwrap();
    guard.close().unwrap();
    let dir = dir();
    let report = save_calibrated(&model, dir.path()).unwrap();
    assert_eq!(report.ignored, ["pooler.dense"]);
}

#[test]
fn routers_of_experts_are_left_out_by_name() {
    let list = "/quantization_config/ignore";
    let spelling = Spelling::CompressedTensors;
    let got = left_out("qwen3_moe", "delayed", spelling, "config.json", list);
    assert_eq!(got, json!(["model.layers.0.mlp.gate", "lm_head"]));
}

#[test]
fn two_linears_with_one_weight_are_both_exported() {
    if skipped_on_cuda("candle 0.11 casts nothing to or from F8E4M3 there") {
        return;
    }
    let weight = var(5, &[WIDTH, WIDTH]);
    let layer = |path: &str| Linear::new(weight.as_tensor().clone(), None).with_path(path);
    let mut model = (layer("a"), vec![layer("b"), layer("b")]);
    assert_eq!(prepare(&mut model).converted(), 3);
    let guard = fp8_autocast(Autocast::new(delayed(4)).calibrating(true)).unwrap();
    model.0.forward(&tensor(6, &[2, WIDTH])).unwrap();
    model.1[0]
        .forward(&(tensor(6, &[2, WIDTH]) * 2.).unwrap())
        .unwrap();
    guard.close().unwrap();
    let dir = dir();
    let report = save_calibrated(&model, dir.path()).unwrap();
    assert_eq!(report.quantized, ["a", "b"], "the same layer twice is one");
    let file = Checkpoint::open(&[&report.model]).unwrap();
    let value = |name: &str| {
        flat(
            &file
                .tensor(name, &device())
                .unwrap()
                .to_dtype(DType::F32)
                .unwrap(),
        )
    };
    assert_eq!(value("a.weight"), value("b.weight"));
    assert_eq!(
        value("a.input_scale")[0] * 2.,
        value("b.input_scale")[0],
        "inputs of their own"
    );
}

#[test]
fn a_tied_head_is_reported_exported_and_served_in_high_precision() {
    let (vars, dir) = (VarMap::new(), tempfile::tempdir().unwrap());
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let mut model = Tied::new(vb, true);
    fill(&vars, 9);
    let report = prepare(&mut model);
    assert_eq!((report.converted(), report.skipped()), (1, 1), "{report}");
    assert!(report.to_string().contains("`embed.weight`"), "{report}");
    let ids = Tensor::arange(0u32, 24, &device()).unwrap();
    calibrate(&model, delayed(4), &ids);
    let report = save_calibrated(&model, dir.path()).unwrap();
    assert_eq!(report.quantized, ["fc"]);
    assert_eq!(report.ignored, ["head"]);
    assert_eq!(report.tied["head.weight"], "embed.weight");
    let open = || Checkpoint::open(&[&report.model]).unwrap();
    assert!(open().dtype("head.weight").is_none(), "stored once");
    assert_eq!(open().metadata("head.weight"), Some("embed.weight"));
    assert_eq!(quantization(dir.path())["ignore"], json!(["head"]));

    let expected = eval(&model, delayed(4), &ids);
    for ties in [true, false] {
        let vb = open().var_builder(DType::F32, &device()).unwrap();
        let served = Tied::new(vb, ties).forward(&ids).unwrap();
        assert_same(&format!("served, ties itself: {ties}"), &served, &expected);
    }
}
