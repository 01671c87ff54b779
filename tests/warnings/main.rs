//! Warnings of guards: one if nothing was cast under a guard, once in a process, one for a guard that never ends, and one for each that is
//! dropped after a failure; of saving in the middle of a step, and resuming without a loss scaler; of settings without an effect; of skipped
//! steps; of what stays in high precision unsaid; of files.
//! This is a separate program because some are given once, and because a process has one subscriber for messages.

mod files;
mod unprepared;

use candle_core::{DType, Device, Module, Var};
use candle_nn::{VarBuilder, VarMap};
use fp8::checkpoint::{TrainingMeta, resume_sharded, save_fp8_state, save_sharded};
use fp8::nn::{LayerInputs, MultiheadAttention, TransformerConfig, multihead_attention};
use fp8::optim::{AdamW, AdamWConfig, DynamicLossScaler, LossScaled};
use fp8::ranks::{ShardedVarMap, threads};
use fp8::{
    AttentionProducts, Autocast, Fp8LinearConfig, KeptActivations, RecipeName, end_step,
    fp8_autocast, nn, prepare_fp8,
};
use fp8_test_support::child::child;
use fp8_test_support::{Layer, Warnings, cpu_tensor, delayed, prepare, tensor, var};
use std::sync::{Arc, LazyLock};

/// How many messages so far contain `part`.
fn said(part: &str) -> usize {
    static KEPT: LazyLock<Warnings> = LazyLock::new(|| {
        let kept = Warnings::default();
        tracing::subscriber::set_global_default(kept.clone()).unwrap();
        kept
    });
    KEPT.count(part)
}

#[test]
fn a_guard_under_which_nothing_is_cast_warns_once() {
    let said = || said("without any FP8");
    let x = tensor(1, &[2, 8]);

    // No warning: something was cast, or nothing was meant to be.
    let layer = Layer::prepared("fc", 1, 4, 8);
    let guard = fp8_autocast(delayed(4)).unwrap();
    layer.linear.forward(&x).unwrap();
    assert_eq!(guard.close().unwrap().casts(), 2);
    drop(fp8_autocast(Autocast::disabled()).unwrap());
    let calibrating = Autocast::new(delayed(4)).calibrating(true);
    drop(fp8_autocast(calibrating).unwrap());
    // A guard around a loop, which closes after its last step has ended.
    let guard = fp8_autocast(delayed(4)).unwrap();
    layer.linear.forward(&x).unwrap();
    end_step().unwrap();
    guard.close().unwrap();
    assert_eq!(said(), 0);

    // A warning: the model is not prepared.
    let plain = Layer::new("plain", 1, 4, 8);
    let guard = fp8_autocast(delayed(4)).unwrap();
    plain.linear.forward(&x).unwrap();
    let summary = guard.close().unwrap();
    assert_eq!((summary.casts(), summary.layers()), (0, 0));
    assert_eq!(said(), 1);
    assert_eq!(crate::said("not prepared (`plain`): call prepare_fp8"), 1);

    // No second warning for a guard that closes at once, or for a forward pass on another thread.
    let _ = fp8_autocast(delayed(4)).unwrap();
    layer.linear.forward(&x).unwrap();
    let guard = fp8_autocast(delayed(4)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| layer.linear.forward(&x).unwrap());
    });
    assert_eq!(guard.close().unwrap().casts(), 0);
    assert_eq!(said(), 1);
}

#[test]
fn steps_inside_of_a_forgotten_guard_warn_once_they_train_on() {
    let said = || said("goes on although weights have changed");
    let x = tensor(1, &[2, 8]);
    let layer = Layer::prepared("fc", 1, 4, 8);
    let steps_of = |forgotten: bool| {
        for step in 0..3 {
            let guard = fp8_autocast(delayed(4)).unwrap();
            // Two micro-batches.
            for _ in 0..2 {
                let inner = fp8_autocast(delayed(4)).unwrap();
                layer.linear.forward(&x).unwrap();
                inner.close().unwrap();
            }
            guard.close().unwrap();
            assert_eq!(said(), usize::from(forgotten && step > 0), "step {step}");
            layer.weight.set(&tensor(2 + step, &[4, 8])).unwrap();
        }
    };
    assert_eq!(said(), 0);
    steps_of(false);
    std::mem::forget(fp8_autocast(delayed(4)).unwrap());
    steps_of(true);
}

/// With both options, attention by itself keeps nothing in high precision that this option could keep in FP8. It has an effect all the same.
#[test]
fn kept_activations_warn_where_no_module_is_one_node() {
    let said = || said("kept_activations has no effect");
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let config = TransformerConfig::new(16, 2);
    let mut model = multihead_attention(&config, vb).unwrap();
    prepare(&mut model);
    let recipe = Fp8LinearConfig::from_recipe_name(RecipeName::Delayed)
        .with_kept_activations(KeptActivations::fp8())
        .with_attention(AttentionProducts::all());
    let step = |model: &MultiheadAttention| {
        let x = Var::from_tensor(&tensor(1, &[2, 5, 16])).unwrap();
        let guard = fp8_autocast(recipe.clone()).unwrap();
        let y = model
            .forward(x.as_tensor(), &LayerInputs::default())
            .unwrap();
        fp8::backward(&y.sum_all().unwrap()).unwrap();
        guard.close().unwrap()
    };
    for _ in 0..2 {
        assert_eq!(step(&model).kept_bytes(), 0);
    }
    assert_eq!(said(), 0);
    let apart = model.with_single_node(false);
    for _ in 0..2 {
        assert_eq!(step(&apart).kept_bytes(), 0);
        assert_eq!(said(), 1);
    }
}

#[test]
fn recomputed_weights_warn_once() {
    let said = || said("force_recompute_fp8_weight_in_bwd has no effect");
    let x = tensor(1, &[2, 8]);
    let layer = Layer::prepared("fc", 1, 4, 8);
    let step = |config: &Fp8LinearConfig| {
        let guard = fp8_autocast(config.clone()).unwrap();
        layer.linear.forward(&x).unwrap();
        guard.close().unwrap();
    };
    let config = Fp8LinearConfig::default();
    assert_eq!(said(), 0);
    step(&config);
    assert_eq!(said(), 0);
    let config = config.with_force_recompute_fp8_weight_in_bwd(true);
    for _ in 0..2 {
        step(&config);
        assert_eq!(said(), 1);
    }
}

/// Codes of a weight in parts need one scale for all of it.
#[test]
fn weights_in_parts_that_travel_in_f32_warn_once() {
    let said = || said("enable_fp8_all_gather: `fc.weight` travels in f32");
    let step = |recipe: RecipeName| {
        threads::run(2, |group| {
            let map = ShardedVarMap::new(&group, &Device::Cpu);
            let model = nn::linear(16, 8, map.var_builder().pp("fc")).unwrap();
            prepare_fp8(&model, &Default::default()).unwrap();
            let config = Fp8LinearConfig::from_recipe_name(recipe);
            let config = config.with_enable_fp8_all_gather(true);
            let autocast = Autocast::new(config).reduction_group(Arc::new(group.clone()));
            let guard = fp8_autocast(autocast).unwrap();
            let y = model.try_forward(&cpu_tensor(1, &[4, 16])).unwrap();
            fp8::backward(&y.sqr().unwrap().mean_all().unwrap()).unwrap();
            guard.close().unwrap();
        });
    };
    assert_eq!(said(), 0);
    step(RecipeName::Tensorwise);
    assert_eq!(said(), 0);
    for _ in 0..2 {
        step(RecipeName::Rowwise);
        assert_eq!(said(), 1);
    }
}

/// A program that keeps no log sees warnings on stderr, those that are given once in a process once.
#[test]
fn warnings_reach_stderr_without_a_log() {
    let output = child("nothing_is_cast_without_a_log").output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let warnings = errors.lines().filter(|line| line.starts_with("warning: "));
    let warnings: Vec<_> = warnings.collect();
    assert_eq!(warnings.len(), 1, "{errors}");
    assert!(warnings[0].contains("without any FP8"), "{errors}");
}

#[test]
#[ignore = "run by warnings_reach_stderr_without_a_log in a child process"]
fn nothing_is_cast_without_a_log() {
    for _ in 0..2 {
        fp8_autocast(delayed(4)).unwrap().close().unwrap();
    }
}

#[test]
fn a_guard_dropped_after_a_failure_warns_each_time() {
    let said = || said("was dropped after one of its layers has failed");
    let layer = Layer::prepared("fc", 1, 4, 8);
    let failed = || {
        let guard = fp8_autocast(delayed(4)).unwrap();
        layer.linear.forward(&tensor(1, &[2, 8])).unwrap();
        layer.linear.forward(&tensor(2, &[2, 7])).unwrap_err();
        guard
    };
    assert_eq!(said(), 0);
    for times in 1..=2 {
        drop(failed());
        assert_eq!(said(), times);
    }
    // No warning where the program says how the step ends.
    failed().abort();
    failed().close().unwrap();
    assert_eq!(said(), 2);
}

#[test]
fn saving_that_ends_an_open_step_warns_once() {
    let said = || said("saving ends the FP8 step that is open on this thread");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state.safetensors");
    let layer = Layer::prepared("fc", 1, 4, 8);
    let guard = fp8_autocast(delayed(4)).unwrap();
    let step = |ends: bool| {
        layer.linear.forward(&tensor(1, &[2, 8])).unwrap();
        if ends {
            end_step().unwrap();
        }
        save_fp8_state(&path, &layer.linear).unwrap();
    };
    step(true);
    assert_eq!(said(), 0);
    for _ in 0..2 {
        step(false);
        assert_eq!(said(), 1);
    }
    guard.close().unwrap();
}

/// Of several ranks one says so.
#[test]
fn resuming_in_parts_without_the_loss_scaler_warns() {
    let said = || said("the checkpoint has a loss scaler, this run has none");
    let dir = tempfile::tempdir().unwrap();
    let meta = TrainingMeta {
        step: 1,
        recipe: None,
        random: 0.into(),
        extra: 0.into(),
    };
    assert_eq!(said(), 0);
    threads::run(2, |group| {
        let map = ShardedVarMap::new(&group, &Device::Cpu);
        let model = nn::linear(16, 8, map.var_builder().pp("fc")).unwrap();
        let adamw = AdamW::from_sharded(&map, AdamWConfig::default()).unwrap();
        let mut scaled = LossScaled::new(adamw, DynamicLossScaler::default());
        save_sharded(dir.path(), &model, &map, &scaled, &meta).unwrap();
        resume_sharded(dir.path(), &model, &map, &mut scaled, None).unwrap();
        group.barrier().unwrap();
        assert_eq!(said(), 0);
        group.barrier().unwrap();
        resume_sharded(dir.path(), &model, &map, &mut scaled.optimizer, None).unwrap();
    });
    assert_eq!(said(), 1);
}

#[test]
fn every_skipped_step_warns() {
    let said = || {
        (
            said("gradients are not finite: optimizer step skipped"),
            said("gradients are not finite: step skipped, the loss scale backs off"),
        )
    };
    let w = var(1, &[3]);
    let loss = |factor: f64| (w.sqr().unwrap().sum_all().unwrap() * factor).unwrap();
    let named = vec![("w".to_string(), w.clone())];
    let mut optimizer = AdamW::from_named(named, AdamWConfig::default()).unwrap();
    let mut apply = |factor: f64| {
        let report = optimizer.apply(&loss(factor).backward().unwrap()).unwrap();
        let skipped = report.skipped().unwrap();
        // Where a CUDA device decides, the first reading warns, and no later one.
        assert_eq!(report.skipped().unwrap(), skipped);
        skipped
    };
    assert_eq!(said(), (0, 0));
    assert!(!apply(1.));
    assert_eq!(said(), (0, 0));
    for times in 1..=2 {
        assert!(apply(f64::INFINITY));
        assert_eq!(said(), (times, 0));
    }
    let mut scaler = DynamicLossScaler::default();
    let mut scaled = |factor: f64| {
        let step = scaler.backward_step(&loss(factor), &mut optimizer);
        step.unwrap().skipped()
    };
    assert!(!scaled(1.));
    assert_eq!(said(), (2, 0));
    for times in 1..=2 {
        assert!(scaled(f64::NAN));
        assert_eq!(said(), (2, times));
    }
}
