//! Weights that two layers share.

use crate::net::*;
use candle_core::{DType, Module};
use candle_nn::{VarBuilder, VarMap};
use fp8::load::Checkpoint;
use fp8::nn::{self, Linear};
use fp8::{Autocast, Fp8Module, fp8_autocast, save_calibrated};
use fp8_test_support::{delayed, device, fill, flat, prepare, skipped_on_cuda, tensor, var};
use safetensors::Dtype;
use serde_json::json;

#[derive(Fp8Module)]
struct Tied {
    embed: nn::Embedding,
    fc: Linear,
    head: Linear,
}

#[test]
fn a_weight_tied_to_an_embedding_stays_in_high_precision() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let embed = nn::embedding(VOCAB, WIDTH, vb.pp("embed")).unwrap();
    let head = Linear::new(embed.embeddings().clone(), None).with_path("head");
    let fc = nn::linear_no_bias(WIDTH, WIDTH, vb.pp("fc")).unwrap();
    fill(&vars, 9);
    let mut model = Tied { embed, fc, head };
    let report = prepare(&mut model);
    assert_eq!((report.converted(), report.skipped()), (1, 1), "{report}");
    let reason = "its weight is `embed.weight` too, which stays in high precision";
    assert!(report.to_string().contains(reason), "{report}");
    let guard = fp8_autocast(Autocast::new(delayed(4)).calibrating(true)).unwrap();
    let h = model
        .fc
        .forward(&model.embed.forward(&ids(0)).unwrap())
        .unwrap();
    model.head.forward(&h).unwrap();
    guard.close().unwrap();
    let dir = dir();
    let report = save_calibrated(&model, dir.path()).unwrap();
    assert_eq!(
        (report.quantized, report.ignored),
        (vec!["fc".into()], vec!["head".into()])
    );
    let tensors = contents(&report.model);
    let high_precision = (Dtype::F32, vec![VOCAB, WIDTH]);
    assert_eq!(tensors["embed.weight"], high_precision);
    let head: Vec<_> = tensors.keys().filter(|n| n.starts_with("head")).collect();
    assert_eq!(head, Vec::<&String>::new(), "stored once");
    assert_eq!(
        json_of(&report.config)["quantization_config"]["ignore"],
        json!(["head"])
    );
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
