//! Checkpoints inside of an open guard: after a step, never in the middle of one.

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::checkpoint::{Fp8Rows, TrainingMeta, fp8_state, save_fp8_state, save_training};
use fp8_recipes::nn::{self, Linear};
use fp8_recipes::optim::{AdamW, AdamWConfig};
use fp8_recipes::{Error, Recipe, TrainingCheckpointError, end_step, fp8_autocast, prepare_fp8};
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
        let x = Tensor::from_vec(steps(100 + batch, 64), (4, 16), &Device::Cpu).unwrap();
        let y = self.fc.forward(&(x * f64::from(batch + 1)).unwrap());
        y.unwrap().sqr().unwrap().mean_all().unwrap()
    }

    fn save(&self, path: &Path) -> Result<(), Error> {
        let meta = TrainingMeta {
            step: 1,
            recipe: Some(recipe()),
            random: Value::Null,
            extra: Value::Null,
        };
        save_training(path, &self.fc, &self.vars, &self.optimizer, &meta)
    }

    fn bits(&self) -> Vec<Vec<u32>> {
        named(&self.vars).iter().map(|(_, var)| bits(var)).collect()
    }
}

fn recipe() -> Recipe {
    "delayed".parse().unwrap()
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
                let saved = saves.then(|| [run.save(&path), save_fp8_state(&path, &run.fc)]);
                for error in saved.into_iter().flatten() {
                    assert!(
                        matches!(
                            &error,
                            Err(Error::TrainingCheckpoint(
                                TrainingCheckpointError::UnfinishedStep { layer }
                            )) if layer == "fc"
                        ),
                        "{error:?}"
                    );
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
    // Taken by this library's optimizer, skipped by it, taken by code that announces nothing.
    for how in ["taken", "skipped", "by hand"] {
        let train = |saves: bool| {
            let mut run = Run::new();
            let mut losses = vec![];
            let guard = fp8_autocast(recipe()).unwrap();
            for step in 0..4 {
                let loss = run.loss(step);
                losses.push(bits(&loss));
                let loss = match how {
                    "skipped" => (loss * f64::INFINITY).unwrap(),
                    _ => loss,
                };
                let grads = loss.backward().unwrap();
                match how {
                    "by hand" => {
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
