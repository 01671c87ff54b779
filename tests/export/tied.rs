//! Weights that two layers share.

use crate::net::*;
use candle_core::{DType, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::load::Checkpoint;
use fp8::nn::Linear;
use fp8::{Autocast, fp8_autocast, save_calibrated};
use fp8_test_support::calibrated::{IN, Tied, calibrate, eval, quantization};
use fp8_test_support::{
    assert_same, delayed, device, fill, flat, prepare, skipped_on_cuda, tensor, var,
};
use safetensors::Dtype;
use serde_json::json;

#[test]
fn a_weight_tied_to_an_embedding_stays_in_high_precision() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let mut model = Tied::new(vb, true);
    fill(&vars, 9);
    let report = prepare(&mut model);
    assert_eq!((report.converted(), report.skipped()), (1, 1), "{report}");
    let reason = "its weight is `embed.weight` too, which stays in high precision";
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
