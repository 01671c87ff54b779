//! Weights that two layers share.

use crate::net::*;
use candle_core::{DType, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::load::Checkpoint;
use fp8::models::{Bert, BertConfig, Llama, LlamaConfig};
use fp8::nn::{Linear, linear_no_bias};
use fp8::rewrite::Spelling;
use fp8::{
    Autocast, ExportOptions, ExportReport, Recipe, fp8_autocast, prepare_fp8, save_calibrated,
    save_calibrated_with,
};
use fp8_test_support::calibrated::{IN, Tied, calibrate, eval, quantization};
use fp8_test_support::{
    assert_same, assert_text, delayed, device, fill, flat, prepare, skipped_on_cuda, tensor, var,
};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

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

/// Writes the tensors of a model, multiplied by `factor`. Whoever builds a model from the file reads them anew.
fn file_of(dir: &Path, name: &str, factor: f64) -> PathBuf {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    Tied::new(vb, false);
    fill(&vars, 9);
    for var in vars.all_vars() {
        var.set(&(var.as_tensor() * factor).unwrap()).unwrap();
    }
    let path = dir.join(name);
    vars.save(&path).unwrap();
    path
}

#[test]
fn layers_that_are_built_twice_from_one_file_are_stored_once() {
    let dir = dir();
    let path = file_of(dir.path(), "source.safetensors", 1.);
    let built = || Tied::new(candle_var_builder(&path, DType::F32), false);
    let mut model = (built(), built());
    prepare(&mut model);
    let ids = Tensor::arange(0u32, 24, &device()).unwrap();
    calibrate(&model.0, delayed(4), &ids);
    let once = save_calibrated(&model.0, dir.path().join("once")).unwrap();
    let twice = save_calibrated(&model, dir.path().join("twice")).unwrap();
    assert_eq!(twice.quantized, ["fc", "head"]);
    let bytes = |report: &ExportReport| fs::read(&report.model).unwrap();
    assert_eq!(bytes(&twice), bytes(&once));

    // Layers that hold FP8 codes, too.
    let served = || {
        let file = Checkpoint::open(&[&once.model]).unwrap();
        Tied::new(file.var_builder(DType::F32, &device()).unwrap(), false)
    };
    let again = save_calibrated(&(served(), served()), dir.path().join("again")).unwrap();
    assert_eq!(again.quantized, ["fc", "head"]);
    assert_eq!(bytes(&again), bytes(&once));
}

#[test]
fn two_layers_of_one_name_that_differ_are_refused() {
    let dir = dir();
    let mut exported = vec![];
    // Under twice the scale, twice a weight has the same codes.
    for (name, factor) in [("one", 1.), ("two", 2.)] {
        let path = file_of(dir.path(), name, factor);
        let vb = candle_var_builder(&path, DType::F32);
        let mut layer = linear_no_bias(IN, IN, vb.pp("fc")).unwrap();
        prepare(&mut layer);
        calibrate(&layer, delayed(4), &tensor(6, &[2, IN]));
        let target = dir.path().join(format!("{name}-fp8"));
        let report = save_calibrated(&layer, target).unwrap();
        exported.push((layer, report.model));
    }
    let served = |path: &PathBuf| {
        let file = Checkpoint::open(&[path]).unwrap();
        let vb = file.var_builder(DType::F32, &device()).unwrap();
        linear_no_bias(IN, IN, vb.pp("fc")).unwrap()
    };
    let [(one, file), (two, other)] = &exported[..] else {
        panic!("two layers");
    };
    let codes = |path: &PathBuf| {
        let layer = served(path);
        let codes = layer.static_weight().unwrap().codes().codes();
        flat(&codes.to_dtype(DType::F32).unwrap())
    };
    assert_eq!(codes(file), codes(other));
    for (case, model) in [
        ("values", (one.clone(), two.clone())),
        ("scales", (served(file), served(other))),
        ("codes and values", (served(file), one.clone())),
    ] {
        let error = save_calibrated(&model, dir.path().join("both")).unwrap_err();
        assert_text(case, error, &["`fc.weight`", "two different tensors"]);
    }
}

#[test]
fn a_head_with_the_name_of_the_embedding_stays_in_high_precision() {
    let dir = dir();
    let path = file_of(dir.path(), "source.safetensors", 1.);
    let ids = Tensor::arange(0u32, 24, &device()).unwrap();
    for head_first in [false, true] {
        let vb = candle_var_builder(&path, DType::F32);
        let head = linear_no_bias(IN, VOCAB, vb.pp("embed")).unwrap();
        let mut model = Tied {
            head,
            ..Tied::new(vb, false)
        };
        let report = prepare(&mut model);
        assert_eq!((report.converted(), report.skipped()), (1, 1), "{report}");
        let reason = "its weight is shared with `embed.weight`, which stays in high precision";
        assert!(report.to_string().contains(reason), "{report}");
        calibrate(&model, delayed(4), &ids);
        let expected = eval(&model, delayed(4), &ids);
        let target = dir.path().join(format!("{head_first}"));
        let Tied { embed, fc, head } = model;
        let report = match head_first {
            true => save_calibrated(&(head, fc, embed), target),
            false => save_calibrated(&(embed, fc, head), target),
        };
        let report = report.unwrap();
        assert_eq!(report.quantized, ["fc"], "{head_first}");
        assert_eq!(report.ignored, ["embed"], "{head_first}");
        let tensors = contents(&report.model);
        let high_precision = (Dtype::F32, vec![VOCAB, IN]);
        assert_eq!(tensors["embed.weight"], high_precision, "{head_first}");
        let file = Checkpoint::open(&[&report.model]).unwrap();
        let vb = file.var_builder(DType::F32, &device()).unwrap();
        let served = Tied::new(vb, true).forward(&ids).unwrap();
        let case = format!("served, head first: {head_first}");
        assert_same(&case, &served, &expected);
    }
}
