//! Other things that a checkpoint restores: calibration, counts, custom reductions, steps on other threads.

use crate::run::file;
use candle_core::{DType, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::checkpoint::{TrainingMeta, fp8_state, resume_training, save_training, training_meta};
use fp8::fp8_core::{AmaxCompute, CustomAmax};
use fp8::optim::{AdamW, AdamWConfig};
use fp8::{Autocast, Error, Recipe, end_step, fp8_autocast, save_calibrated};
use fp8_test_support::{
    Mlp, assert_same, assert_text, delayed, device, fill, flat, of, prepare, skipped_on_cuda,
    slots, tensor,
};
use serde_json::Value;
use std::path::Path;

struct Run {
    vars: VarMap,
    mlp: Mlp,
    optimizer: AdamW,
    recipe: Recipe,
    step: u64,
}

impl Run {
    fn new(seed: u64, recipe: impl Into<Recipe>) -> Self {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
        let mut mlp = Mlp::new(vb).unwrap();
        fill(&vars, seed);
        prepare(&mut mlp);
        let optimizer = AdamW::from_varmap(&vars, AdamWConfig::default()).unwrap();
        Self {
            vars,
            mlp,
            optimizer,
            recipe: recipe.into(),
            step: 0,
        }
    }

    fn input(&self) -> Tensor {
        (tensor(100 + self.step, &[6, Mlp::IN]) * (1. + (self.step % 3) as f64)).unwrap()
    }

    fn forward(&self) -> Tensor {
        let guard = fp8_autocast(self.recipe.clone()).unwrap();
        let y = self.mlp.forward(&self.input()).unwrap();
        guard.close().unwrap();
        y
    }

    fn finish(&mut self, y: &Tensor) {
        let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        assert!(!self.optimizer.apply(&grads).unwrap().skipped().unwrap());
        self.step += 1;
    }

    fn train(&mut self) -> Tensor {
        let y = self.forward();
        self.finish(&y);
        y
    }

    fn save(&self, path: &Path) {
        let meta = TrainingMeta {
            step: self.step,
            recipe: Some(self.recipe.clone()),
            random: Value::Null,
            extra: Value::Null,
        };
        save_training(path, &self.mlp, &self.vars, &self.optimizer, &meta).unwrap();
    }

    fn resume(&mut self, path: &Path) -> fp8::Result<()> {
        let (mlp, vars, recipe) = (&self.mlp, &self.vars, Some(&self.recipe));
        let meta = resume_training(path, mlp, vars, &mut self.optimizer, recipe)?;
        self.step = meta.step;
        Ok(())
    }
}

fn calibrate(run: &Run) {
    let guard = fp8_autocast(Autocast::new(run.recipe.clone()).calibrating(true)).unwrap();
    run.mlp.forward(&run.input()).unwrap();
    guard.close().unwrap();
}

#[test]
fn a_calibration_comes_back() {
    for recipe in ["delayed", "tensorwise", "rowwise"] {
        let recipe: Recipe = recipe.parse().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut run = Run::new(1, recipe.clone());
        run.train();
        end_step().unwrap();
        calibrate(&run);
        run.save(&file(&dir));
        let mut resumed = Run::new(2, recipe);
        resumed.resume(&file(&dir)).unwrap();
        assert_eq!(
            fp8_state(&run.mlp).unwrap(),
            fp8_state(&resumed.mlp).unwrap()
        );
        let written = [&run, &resumed].map(|run| {
            let dir = tempfile::tempdir().unwrap();
            let report = save_calibrated(&run.mlp, dir.path()).unwrap();
            std::fs::read(report.model).unwrap()
        });
        assert!(written[0] == written[1], "the same file from both");
        // Training ends the calibration in the resumed run as well.
        resumed.train();
        let error = save_calibrated(&resumed.mlp, dir.path()).unwrap_err();
        assert_text("trained", error, &["`up`", "calibrat"]);
    }
}

#[test]
fn counts_of_inf_and_nan_come_back() {
    for recipe in ["delayed", "tensorwise"] {
        let recipe: Recipe = recipe.parse().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut run = Run::new(1, recipe.clone());
        run.train();
        let guard = fp8_autocast(recipe.clone()).unwrap();
        let nan = of(&[f32::NAN; Mlp::IN], &[1, Mlp::IN]);
        run.mlp.up.forward(&nan).unwrap();
        guard.close().unwrap();
        assert_eq!(slots(&run.mlp.up)[0].non_finite, 1);
        run.save(&file(&dir));
        let mut resumed = Run::new(2, recipe.clone());
        resumed.resume(&file(&dir)).unwrap();
        assert_eq!(slots(&resumed.mlp.up), slots(&run.mlp.up));
        // The next step does not report them as its own.
        let guard = fp8_autocast(recipe).unwrap();
        resumed.mlp.forward(&resumed.input()).unwrap();
        assert_eq!(guard.close().unwrap().non_finite().unwrap(), []);
    }
}

/// Codes of a weight with Inf are finite, and so are gradients: each step that uses them is skipped, in a resumed run too.
#[test]
fn inf_in_a_weight_skips_the_steps_of_a_resumed_run() {
    if skipped_on_cuda("a device does not tell the host of Inf in codes that it keeps") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut run = Run::new(1, delayed(4));
    run.train();
    let weight = run.vars.data().lock().unwrap()["up.weight"].clone();
    let mut values = flat(&weight);
    values[3] = f32::INFINITY;
    weight.set(&of(&values, weight.dims())).unwrap();
    let skips = |run: &mut Run| {
        let loss = run.forward().sqr().unwrap().sum_all().unwrap();
        let grads = loss.backward().unwrap();
        run.optimizer.apply(&grads).unwrap().skipped().unwrap()
    };
    assert!(skips(&mut run));
    run.save(&file(&dir));
    let mut resumed = Run::new(2, delayed(4));
    resumed.resume(&file(&dir)).unwrap();
    for (case, run) in [("as before", &mut run), ("resumed", &mut resumed)] {
        for step in 0..2 {
            assert!(skips(run), "{case}, step {step}");
        }
    }
}

fn second_largest(name: &str) -> CustomAmax {
    CustomAmax::new(name, |history: &[f32]| {
        let mut sorted = history.to_vec();
        sorted.sort_by(f32::total_cmp);
        sorted[sorted.len() - 2].max(sorted[0])
    })
}

#[test]
fn a_custom_reduction_is_found_again_by_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let function = second_largest("second_largest");
    let recipe = delayed(4).with_amax_compute(AmaxCompute::Custom(function));
    let mut run = Run::new(1, recipe);
    for _ in 0..5 {
        run.train();
    }
    run.save(&file(&dir));
    let expected: Vec<Tensor> = (0..4).map(|_| run.train()).collect();

    // In another process a different function object has the same name.
    let stored = training_meta(file(&dir)).unwrap().recipe.unwrap();
    assert_text(
        "unbound",
        stored.resolve().unwrap_err(),
        &["second_largest"],
    );
    let again = second_largest("second_largest");
    let mut resumed = Run::new(2, stored.bind_amax_compute(&again).unwrap());
    resumed.resume(&file(&dir)).unwrap();
    for y in &expected {
        assert_same("after resuming", &resumed.train(), y);
    }
    // A function with another name is another recipe.
    let other = delayed(4).with_amax_compute(AmaxCompute::Custom(second_largest("other")));
    let error = Run::new(2, other).resume(&file(&dir)).unwrap_err();
    assert_text(
        "other name",
        &error,
        &["custom:second_largest", "custom:other"],
    );
    assert!(matches!(
        error,
        Error::TrainingCheckpoint(fp8::TrainingCheckpointError::Mismatch { .. })
    ));
}

/// Guards and backward passes run on other threads than the one that saves, which may end in any order.
#[test]
fn steps_of_other_threads_are_in_the_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = Run::new(1, delayed(4));
    let mut control = Run::new(1, delayed(4));
    for _ in 0..3 {
        std::thread::scope(|scope| {
            scope.spawn(|| run.train());
        });
        control.train();
    }
    // Forward on one thread, backward on another.
    let y = std::thread::scope(|scope| scope.spawn(|| run.forward()).join().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| run.finish(&y));
    });
    control.train();
    run.save(&file(&dir));
    control.save(&dir.path().join("control.safetensors"));
    assert_eq!(
        fp8_state(&run.mlp).unwrap(),
        fp8_state(&control.mlp).unwrap(),
        "nothing of the last step is missing"
    );
    let mut resumed = Run::new(2, delayed(4));
    resumed.resume(&file(&dir)).unwrap();
    for _ in 0..3 {
        assert_same("after resuming", &resumed.train(), &run.train());
    }
}
