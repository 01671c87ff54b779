//! Training checkpoints whose state is impossible.

use super::hostile::dir;
use candle_core::{DType, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::atomic::write_safetensors_atomic;
use fp8::checkpoint::{TrainingMeta, resume_training, save_training};
use fp8::config::Recipe;
use fp8::load::Checkpoint;
use fp8::optim::{AdamW, AdamWConfig, OptimError};
use fp8::{Error, FilesError, fp8_autocast};
use fp8_test_support::{Mlp, assert_text, delayed, device, fill, flat, of, prepare, tensor};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};

/// A trained model and its optimizer.
fn trained() -> (VarMap, Mlp, AdamW) {
    let vars = VarMap::new();
    let mut model = Mlp::new(VarBuilder::from_varmap(&vars, DType::F32, &device())).unwrap();
    fill(&vars, 3);
    prepare(&mut model);
    let mut optimizer = AdamW::from_varmap(&vars, AdamWConfig::default()).unwrap();
    for seed in 0..3 {
        let guard = fp8_autocast(delayed(4)).unwrap();
        let x = tensor(seed, &[5, Mlp::IN]);
        let y = candle_core::Module::forward(&model, &x).unwrap();
        guard.close().unwrap();
        let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        assert!(!optimizer.apply(&grads).unwrap().skipped().unwrap());
    }
    (vars, model, optimizer)
}

#[test]
fn impossible_state_is_not_resumed() {
    let dir = dir();
    let path = dir.path().join("checkpoint.safetensors");
    let (vars, model, mut optimizer) = trained();
    let recipe = Recipe::from(delayed(4));
    let meta = TrainingMeta {
        step: 3,
        recipe: Some(recipe.clone()),
        random: Value::Null,
        extra: json!(1),
    };
    save_training(&path, &model, &vars, &optimizer, &meta).unwrap();
    let good = Checkpoint::open(&[&path]).unwrap();
    let metadata: HashMap<String, String> = ["fp8_training", "fp8_state"]
        .into_iter()
        .map(|key| (key.to_string(), good.metadata(key).unwrap().to_string()))
        .collect();
    let tensors: BTreeMap<String, Tensor> = good
        .names()
        .into_iter()
        .map(|name| (name.to_string(), good.tensor(name, &device()).unwrap()))
        .collect();
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let scale = [nan, inf, 0., -1., 1e-40];
    // The last row of the table is that of `up.weight`; the index counts within the row.
    let cases: [(&str, &str, usize, &[f32]); 5] = [
        ("fp8/quant_scale", "up.weight.quant_scale", 0, &scale),
        (
            "fp8/kept_quant_scale",
            "up.weight.kept",
            0,
            &[nan, inf, -1.],
        ),
        (
            "fp8/amax_history",
            "up.weight.amax_history",
            3,
            &[nan, inf, -inf, -1.],
        ),
        (
            "optimizer/down.weight.exp_avg",
            "down.weight.exp_avg",
            119,
            &[nan, inf, -inf],
        ),
        (
            "optimizer/up.bias.exp_avg_sq",
            "up.bias.exp_avg_sq",
            19,
            &[nan, inf, -1e-9],
        ),
    ];
    for (name, own, at, values) in cases {
        for &bad in values {
            let mut changed = tensors.clone();
            let old = &tensors[name];
            let mut all = flat(old);
            let last = all.len() - 1;
            all[last] = bad;
            changed.insert(name.into(), of(&all, old.dims()));
            write_safetensors_atomic(&path, &changed, Some(&metadata)).unwrap();
            let error =
                resume_training(&path, &model, &vars, &mut optimizer, Some(&recipe)).unwrap_err();
            assert!(
                matches!(
                    &error,
                    Error::Files(FilesError::TensorValue { .. })
                        | Error::Optim(OptimError::StateValue { .. })
                ),
                "{error:?}"
            );
            let (value, at) = (format!("{:e}", f64::from(bad)), format!("index {at}"));
            assert_text(name, error, &[own, &value, &at]);
        }
    }
    write_safetensors_atomic(&path, &tensors, Some(&metadata)).unwrap();
    resume_training(&path, &model, &vars, &mut optimizer, Some(&recipe)).unwrap();
}

#[test]
fn invalid_learning_rates_are_refused() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let w = vb
        .get_with_hints(3, "w", candle_nn::Init::Const(1.))
        .unwrap();
    let grads = || w.sqr().unwrap().sum_all().unwrap().backward().unwrap();
    for (bad, text) in [(f64::NAN, "NaN"), (f64::INFINITY, "inf"), (-1e-3, "-0.001")] {
        let config = AdamWConfig {
            lr: bad,
            ..AdamWConfig::default()
        };
        let error = AdamW::from_varmap(&vars, config.clone()).unwrap_err();
        assert_text("constructor", error, &["lr", text]);
        let error = <AdamW as candle_nn::Optimizer>::new(vars.all_vars(), config).unwrap_err();
        assert_text("candle's constructor", error, &["lr", text]);

        let mut optimizer = AdamW::from_varmap(&vars, AdamWConfig::default()).unwrap();
        let error = optimizer.set_lr(bad).unwrap_err();
        assert!(
            matches!(&error, OptimError::InvalidHyperparameter { name: "lr", .. }),
            "{error:?}"
        );
        assert_text("set_lr", error, &["lr", text]);
        assert_eq!(optimizer.lr(), 1e-3, "the old one stays");
        assert!(!optimizer.apply(&grads()).unwrap().skipped().unwrap());

        // candle's interface has no way to refuse a learning rate, so the step does.
        candle_nn::Optimizer::set_learning_rate(&mut optimizer, bad);
        let before = flat(&w);
        let error = optimizer.apply(&grads()).unwrap_err();
        assert_text("the step", error, &["lr", text]);
        assert_eq!(flat(&w), before, "nothing moved");
        optimizer.set_lr(0.1).unwrap();
        assert!(!optimizer.apply(&grads()).unwrap().skipped().unwrap());
        assert!(flat(&w)[0] < before[0] - 0.05);
    }
}
