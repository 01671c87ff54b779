//! Checkpoints inside of an open guard: after a step, never in the middle of one.

use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{Optimizer, VarBuilder, VarMap};
use fp8_recipes::checkpoint::{Fp8Rows, TrainingMeta, fp8_state, save_fp8_state, save_training};
use fp8_recipes::nn::{self, Linear};
use fp8_recipes::optim::{AdamW, AdamWConfig, DynamicLossScaler, ResumableOptimizer};
use fp8_recipes::{
    Autocast, Error, Recipe, TrainingCheckpointError, end_step, fp8_autocast, prepare_fp8,
};
use fp8_test_support::{bits, named, steps};
use serde_json::Value;
use std::path::Path;

struct Run {
    vars: VarMap,
    fc: Linear,
    optimizer: AdamW,
}

impl Run {
    fn new() -> Self {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let fc = nn::linear(16, 8, vb.pp("fc")).unwrap();
        for (i, (_, var)) in named(&vars).iter().enumerate() {
            let start = steps(1 + i as u32, var.elem_count());
            var.set(&Tensor::from_vec(start, var.shape(), &Device::Cpu).unwrap())
                .unwrap();
        }
        prepare_fp8(&fc, &Default::default()).unwrap();
        let optimizer = AdamW::from_varmap(&vars, AdamWConfig::default()).unwrap();
        Self {
            vars,
            fc,
            optimizer,
        }
    }

    /// Larger batches later, so that scales move.
    fn loss(&self, batch: u32) -> Tensor {
        loss_of(&self.fc, batch)
    }

    fn save(&self, path: &Path) -> Result<(), Error> {
        self.save_with(path, &self.optimizer)
    }

    fn save_with(&self, path: &Path, optimizer: &impl ResumableOptimizer) -> Result<(), Error> {
        save(path, &self.fc, &self.vars, optimizer)
    }

    fn bits(&self) -> Vec<Vec<u32>> {
        named(&self.vars).iter().map(|(_, var)| bits(var)).collect()
    }
}

fn save(
    path: &Path,
    fc: &Linear,
    vars: &VarMap,
    optimizer: &impl ResumableOptimizer,
) -> Result<(), Error> {
    let meta = TrainingMeta {
        step: 1,
        recipe: Some(recipe()),
        random: Value::Null,
        extra: Value::Null,
    };
    save_training(path, fc, vars, optimizer, &meta)
}

fn loss_of(fc: &Linear, batch: u32) -> Tensor {
    let x = Tensor::from_vec(steps(100 + batch, 64), (4, 16), &Device::Cpu).unwrap();
    let y = fc.forward(&(x * f64::from(batch + 1)).unwrap());
    y.unwrap().sqr().unwrap().mean_all().unwrap()
}

fn recipe() -> Recipe {
    "delayed".parse().unwrap()
}

fn assert_unfinished(saved: Result<(), Error>) {
    assert!(
        matches!(
            &saved,
            Err(Error::TrainingCheckpoint(
                TrainingCheckpointError::UnfinishedStep { layer }
            )) if layer == "fc"
        ),
        "{saved:?}"
    );
}

#[test]
fn in_the_middle_of_a_step_nothing_is_saved_and_nothing_changes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.safetensors");
    let micro_batches = |saves: bool| -> (Vec<Vec<u32>>, Fp8Rows) {
        let mut run = Run::new();
        let mut losses = vec![];
        let guard = fp8_autocast(recipe()).unwrap();
        for step in 0..2 {
            let mut sum: Option<Tensor> = None;
            for batch in 0..2 {
                let loss = run.loss(2 * step + batch);
                losses.push(bits(&loss));
                sum = Some(match sum {
                    None => loss,
                    Some(sum) => (sum + loss).unwrap(),
                });
                if saves {
                    assert_unfinished(run.save(&path));
                    assert!(!path.exists());
                }
            }
            let grads = sum.unwrap().backward().unwrap();
            assert!(!run.optimizer.apply(&grads).unwrap().skipped().unwrap());
            end_step().unwrap();
        }
        guard.close().unwrap();
        end_step().unwrap();
        (losses, fp8_state(&run.fc).unwrap())
    };
    assert_eq!(micro_batches(true), micro_batches(false));
}

#[test]
fn after_the_optimizers_step_saving_changes_nothing_that_follows() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.safetensors");
    // Taken by this library's optimizer, skipped by it or by its loss scaler, taken by code that announces nothing, before an evaluation too.
    for how in ["taken", "skipped", "scaled", "by hand", "evaluated"] {
        let train = |saves: bool| {
            let mut run = Run::new();
            let (mut losses, mut scaler) = (vec![], DynamicLossScaler::default());
            let guard = fp8_autocast(recipe()).unwrap();
            for step in 0..4 {
                let loss = run.loss(step);
                losses.push(bits(&loss));
                let loss = match how {
                    "skipped" | "scaled" => (loss * f64::INFINITY).unwrap(),
                    _ => loss,
                };
                let mut grads = loss.backward().unwrap();
                match how {
                    "scaled" => {
                        let step = scaler.apply(&mut grads, &mut run.optimizer);
                        assert!(step.unwrap().skipped());
                    }
                    "by hand" | "evaluated" => {
                        for (_, var) in named(&run.vars) {
                            let change = (grads.get(&var).unwrap() * 0.01).unwrap();
                            var.set(&(var.as_tensor() - change).unwrap()).unwrap();
                        }
                    }
                    _ => {
                        let report = run.optimizer.apply(&grads).unwrap();
                        assert_eq!(report.skipped().unwrap(), how == "skipped");
                    }
                }
                if how == "evaluated" {
                    let inner = Autocast::new(recipe()).training(false);
                    let inner = fp8_autocast(inner).unwrap();
                    losses.push(bits(&run.loss(step)));
                    inner.close().unwrap();
                }
                if saves {
                    run.save(&path).unwrap();
                    assert!(path.exists());
                }
                end_step().unwrap();
                if saves {
                    run.save(&path).unwrap();
                }
            }
            guard.close().unwrap();
            (losses, run.bits(), fp8_state(&run.fc).unwrap())
        };
        assert_eq!(train(true), train(false), "{how}");
    }
}

/// A step of an optimizer that announces nothing may change no weight, so nobody can know that it has not been taken.
#[test]
fn where_the_end_of_a_step_cannot_be_known_saving_ends_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.safetensors");
    let run = Run::new();
    let mut sgd = candle_nn::SGD::new(run.vars.all_vars(), 0.).unwrap();
    let guard = fp8_autocast(recipe()).unwrap();
    sgd.step(&run.loss(0).backward().unwrap()).unwrap();
    run.save_with(&path, &sgd).unwrap();
    run.loss(1);
    save_fp8_state(&path, &run.fc).unwrap();
    run.loss(2);
    assert_unfinished(run.save(&path));
    guard.close().unwrap();
}

/// Such as that of an adapter which the model's layers do not know.
#[test]
fn the_step_of_a_parameter_outside_the_model_is_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.safetensors");
    let run = Run::new();
    let outside = Var::ones((), DType::F32, &Device::Cpu).unwrap();
    let named = vec![("outside".to_string(), outside.clone())];
    let mut optimizer = AdamW::from_named(named, AdamWConfig::default()).unwrap();
    let guard = fp8_autocast(recipe()).unwrap();
    let loss = (run.loss(0) * outside.as_tensor()).unwrap();
    assert_unfinished(run.save_with(&path, &optimizer));
    optimizer.apply(&loss.backward().unwrap()).unwrap();
    run.save_with(&path, &optimizer).unwrap();
    guard.close().unwrap();
}

#[test]
fn a_frozen_teacher_needs_no_step() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.safetensors");
    let (mut run, teacher) = (Run::new(), Run::new());
    let guard = fp8_autocast(recipe()).unwrap();
    let loss = (run.loss(0) - teacher.loss(1)).unwrap();
    assert_unfinished(run.save(&path));
    run.optimizer.apply(&loss.backward().unwrap()).unwrap();
    run.save(&path).unwrap();
    guard.close().unwrap();
}

/// Nor one that saves there: its steps are not those of the guard's thread.
#[test]
fn another_thread_that_begins_a_step_does_not_end_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.safetensors");
    let mut run = Run::new();
    let guard = fp8_autocast(recipe()).unwrap();
    let handle = guard.handle();
    for step in 0..2 {
        let fc = &run.fc;
        let (loss, saved) = std::thread::scope(|scope| {
            let there = || {
                let inner = handle.open().unwrap();
                let loss = loss_of(fc, step);
                // Of an optimizer that announces its steps.
                let none = AdamW::from_named(vec![], AdamWConfig::default()).unwrap();
                let saved = save(&path, fc, &VarMap::new(), &none);
                inner.close().unwrap();
                (loss, saved)
            };
            scope.spawn(there).join().unwrap()
        });
        assert_unfinished(saved);
        assert_unfinished(run.save(&path));
        run.optimizer.apply(&loss.backward().unwrap()).unwrap();
        run.save(&path).unwrap();
        end_step().unwrap();
    }
    guard.close().unwrap();
}

/// Those of all parameters that are frozen, or no part of the loss.
#[test]
fn a_step_without_gradients_is_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.safetensors");
    let mut run = Run::new();
    let outside = Var::ones((), DType::F32, &Device::Cpu).unwrap();
    let guard = fp8_autocast(recipe()).unwrap();
    run.loss(0);
    assert_unfinished(run.save(&path));
    let grads = outside.sqr().unwrap().backward().unwrap();
    assert_eq!(run.optimizer.apply(&grads).unwrap().updated, 0);
    run.save(&path).unwrap();
    guard.close().unwrap();
}
