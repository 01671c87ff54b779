//! FP8 state of both forms: histories, scales, counters, reports; checkpoints of one form in the other.

use crate::support::*;
use candle_core::DType;
use fp8_recipes::checkpoint::{
    TrainingMeta, cast_counts, fp8_state, quantized_tensors, resume_training, save_training,
};
use fp8_recipes::config::Recipe;
use fp8_recipes::nn::ops::Activation;
use fp8_recipes::optim::NoOptimizer;
use fp8_recipes::{Autocast, CastObserver, CastStats, PrepareOptions, RecipeName};
use fp8_test_support::assert_same;
use std::sync::{Arc, Mutex};

fn autocast(recipe: &str) -> Autocast {
    Autocast::new(recipe.parse::<Recipe>().unwrap())
}

/// The state of both is the same, to the bit.
#[track_caller]
fn assert_state(case: &str, one: &Model, apart: &Model) {
    let rows = |model: &Model| format!("{:?}", fp8_state(model).unwrap());
    assert_eq!(rows(one), rows(apart), "{case}");
    assert_eq!(cast_counts(one), cast_counts(apart), "{case}");
    assert_eq!(quantized_tensors(one), quantized_tensors(apart), "{case}");
}

#[test]
fn a_step_leaves_the_same_state_counters_and_reports() {
    for recipe in RECIPES {
        for recomputation in [false, true] {
            let config = config()
                .with_hidden_act(Activation::SwiGlu)
                .with_recomputation(recomputation);
            let run = |single| {
                let model = Model::prepared(&config, single, DType::F32);
                let stats = CastStats::default();
                let seen = Arc::new(Mutex::new(vec![]));
                let events = seen.clone();
                let observer = CastObserver::new(move |event| {
                    let name = format!("{} {:?} {:?}", event.path, event.operand, event.cast);
                    events.lock().unwrap().push(name);
                });
                for step in 0..3 {
                    let x = (input(DType::F32) * f64::from(step + 1)).unwrap();
                    let mut guard = autocast(recipe);
                    if step == 1 {
                        guard = guard.with_stats(&stats);
                    }
                    if step == 2 {
                        guard = guard.with_cast_observer(&observer);
                    }
                    let summary = model.step_in(&x, &Default::default(), Some(guard)).summary;
                    assert!(summary.unwrap().non_finite().unwrap().is_empty());
                }
                let mut seen = std::mem::take(&mut *seen.lock().unwrap());
                // Layers of one input may be cast in any order.
                seen.sort();
                (model, stats.take(), seen)
            };
            let (one, apart) = (run(true), run(false));
            let case = format!("{recipe}, recomputation {recomputation}");
            assert_state(&case, &one.0, &apart.0);
            assert!(one.1.rows.len() >= 7, "{case}: {}", one.1.rows.len());
            assert_eq!(one.1, apart.1, "{case}");
            assert!(!one.2.is_empty());
            assert_eq!(one.2, apart.2, "{case}");
        }
    }
}

#[test]
fn a_checkpoint_of_one_form_goes_on_in_the_other() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = Recipe::from(RecipeName::Delayed);
    for from_single in [false, true] {
        let (saved, other) = (
            Model::prepared(&config(), from_single, DType::F32),
            Model::prepared(&config(), !from_single, DType::F32),
        );
        saved.step(&input(DType::F32), &Default::default(), Some("delayed"));
        let path = dir.path().join(format!("{from_single}.safetensors"));
        let meta = TrainingMeta {
            step: 1,
            recipe: Some(recipe.clone()),
            random: Default::default(),
            extra: Default::default(),
        };
        save_training(&path, &saved, &saved.vars, &NoOptimizer, &meta).unwrap();
        resume_training(&path, &other, &other.vars, &mut NoOptimizer, Some(&recipe)).unwrap();
        let x = (input(DType::F32) * 3.).unwrap();
        let step = |model: &Model| model.step(&x, &Default::default(), Some("delayed"));
        let (a, b) = (step(&saved), step(&other));
        assert_steps(
            "resumed",
            &a,
            &b,
            &["x", "input_layernorm"],
            tolerance(DType::F32),
        );
        let rows = |model: &Model| format!("{:?}", fp8_state(model).unwrap());
        assert_eq!(rows(&saved), rows(&other));
    }
}

/// q and k with recipes of their own: nothing is shared that differs.
#[test]
fn layers_with_recipes_of_their_own() {
    for (q, k) in [
        ("rowwise", "delayed"),
        ("mxfp8", "current"),
        ("rowwise", "rowwise"),
    ] {
        let options = PrepareOptions::default()
            .with_recipe("layer.self_attn.q_proj", q.parse::<Recipe>().unwrap())
            .unwrap()
            .with_recipe("layer.self_attn.k_proj", k.parse::<Recipe>().unwrap())
            .unwrap();
        let run = |single| {
            let model = Model::new(&config(), single, DType::F32);
            model.prepare(&options);
            model.step(&input(DType::F32), &Default::default(), Some("delayed"));
            let x = (input(DType::F32) * 3.).unwrap();
            let step = model.step(&x, &Default::default(), Some("delayed"));
            (model, step)
        };
        let ((one, a), (apart, b)) = (run(true), run(false));
        let case = format!("{q}, {k}");
        assert_steps(
            &case,
            &a,
            &b,
            &["x", "input_layernorm"],
            tolerance(DType::F32),
        );
        assert_state(&case, &one, &apart);
    }
}

/// Layers that are not prepared stay in high precision within a node whose other layers compute in FP8.
#[test]
fn a_layer_that_is_switched_off_stays_in_high_precision() {
    let options = PrepareOptions::default()
        .with_off("layer.self_attn.k_proj")
        .unwrap();
    let run = |single| {
        let model = Model::new(&config(), single, DType::F32);
        fp8_recipes::prepare_fp8(&model, &options).unwrap();
        let step = model.step(&input(DType::F32), &Default::default(), Some("delayed"));
        (model, step)
    };
    let ((one, a), (apart, b)) = (run(true), run(false));
    assert_steps(
        "off",
        &a,
        &b,
        &["x", "input_layernorm"],
        tolerance(DType::F32),
    );
    assert_state("off", &one, &apart);
}

/// An evaluation changes no state, a calibration changes it in both forms alike, and both compute the same.
#[test]
fn evaluation_and_calibration() {
    let run = |single| {
        let model = Model::prepared(&config(), single, DType::F32);
        let (x, inputs) = (input(DType::F32), Default::default());
        model.step(&x, &inputs, Some("delayed"));
        let before = format!("{:?}", fp8_state(&model).unwrap());
        let guard = fp8_recipes::fp8_autocast(autocast("delayed").training(false)).unwrap();
        let evaluated = model.layer.forward(&x, &inputs).unwrap();
        guard.close().unwrap();
        assert_eq!(before, format!("{:?}", fp8_state(&model).unwrap()));
        let guard = fp8_recipes::fp8_autocast(autocast("delayed").calibrating(true)).unwrap();
        let calibrated = model.layer.forward(&(&x * 5.).unwrap(), &inputs).unwrap();
        guard.close().unwrap();
        assert_ne!(before, format!("{:?}", fp8_state(&model).unwrap()));
        (model, evaluated, calibrated)
    };
    let (one, apart) = (run(true), run(false));
    assert_same("evaluated", &one.1, &apart.1);
    assert_same("calibrated", &one.2, &apart.2);
    assert_state("calibrated", &one.0, &apart.0);
}
