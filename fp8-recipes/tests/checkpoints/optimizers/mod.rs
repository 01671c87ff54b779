//! Training checkpoints with any optimizer: this library's, candle-nn's, a user's own, none.

mod loss_scaler;
mod refused;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW, VarBuilder, VarMap};
use fp8_recipes::checkpoint::{TrainingMeta, resume_training, save_training};
use fp8_recipes::nn::{self, Linear};
use fp8_recipes::optim::{
    AdamW, AdamWConfig, NoOptimizer, OptimError, OptimizerState, ResumableOptimizer,
};
use fp8_recipes::{Error, Recipe, prepare_fp8, with_fp8};
use fp8_test_support::{Warnings, bits, named, steps};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// A prepared layer with its optimizer.
struct Run<O> {
    vars: VarMap,
    fc: Linear,
    optimizer: O,
}

fn recipe() -> Recipe {
    "delayed".parse().unwrap()
}

fn meta(step: u64) -> TrainingMeta {
    TrainingMeta {
        step,
        recipe: Some(recipe()),
        random: Value::Null,
        extra: Value::Null,
    }
}

impl<O> Run<O> {
    fn new(seed: u32, optimizer: impl FnOnce(&VarMap) -> O) -> Self {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let fc = nn::linear(16, 8, vb.pp("fc")).unwrap();
        for (i, (_, var)) in named(&vars).iter().enumerate() {
            let start = steps(seed + i as u32, var.elem_count());
            let start = Tensor::from_vec(start, var.shape(), &Device::Cpu).unwrap();
            var.set(&start).unwrap();
        }
        prepare_fp8(&fc, &Default::default()).unwrap();
        let optimizer = optimizer(&vars);
        Self {
            vars,
            fc,
            optimizer,
        }
    }

    fn grads(&self, batch: u32) -> GradStore {
        let x = Tensor::from_vec(steps(100 + batch, 64), (4, 16), &Device::Cpu).unwrap();
        let y = with_fp8(recipe(), || self.fc.forward(&x)).unwrap();
        y.sqr().unwrap().mean_all().unwrap().backward().unwrap()
    }

    fn bits(&self) -> Vec<Vec<u32>> {
        named(&self.vars).iter().map(|(_, var)| bits(var)).collect()
    }
}

impl<O: Optimizer> Run<O> {
    fn step(&mut self, batch: u32) {
        let grads = self.grads(batch);
        self.optimizer.step(&grads).unwrap();
    }
}

impl<O: ResumableOptimizer> Run<O> {
    fn save(&self, path: &Path) {
        save_training(path, &self.fc, &self.vars, &self.optimizer, &meta(3)).unwrap();
    }

    fn resume(&mut self, path: &Path) -> Result<TrainingMeta, Error> {
        resume_training(
            path,
            &self.fc,
            &self.vars,
            &mut self.optimizer,
            Some(&recipe()),
        )
    }
}

fn file(dir: &tempfile::TempDir) -> PathBuf {
    dir.path().join("run.safetensors")
}

fn ours(lr: f64) -> impl FnOnce(&VarMap) -> AdamW {
    move |vars| {
        let config = AdamWConfig {
            lr,
            ..AdamWConfig::default()
        };
        AdamW::from_varmap(vars, config).unwrap()
    }
}

fn candles_adamw(lr: f64) -> impl FnOnce(&VarMap) -> candle_nn::AdamW {
    move |vars| {
        let vars = named(vars).into_iter().map(|(_, var)| var).collect();
        candle_nn::AdamW::new_lr(vars, lr).unwrap()
    }
}

fn sgd(lr: f64) -> impl FnOnce(&VarMap) -> candle_nn::SGD {
    move |vars| candle_nn::SGD::new(vars.all_vars(), lr).unwrap()
}

#[test]
fn our_adamw_brings_its_hyperparameters_and_decay_flags_back() -> Outcome {
    let dir = tempfile::tempdir()?;
    let make = |lr: f64| {
        move |vars: &VarMap| {
            let config = AdamWConfig {
                lr,
                weight_decay: 0.5 * lr,
                max_grad_norm: Some(10. * lr),
                ..AdamWConfig::default()
            };
            AdamW::from_varmap(vars, config).unwrap()
        }
    };
    let decay_the_weight =
        |vars: &VarMap| make(0.1)(vars).with_no_decay(|name, _| name == "fc.bias");
    let mut saved = Run::new(1, decay_the_weight);
    for batch in 0..3 {
        saved.step(batch);
    }
    saved.save(&file(&dir));
    let mut resumed = Run::new(2, make(0.02));
    resumed.step(9);
    assert_eq!(resumed.resume(&file(&dir))?, meta(3));
    assert_eq!(resumed.optimizer.config(), saved.optimizer.config());
    for batch in 3..6 {
        saved.step(batch);
        resumed.step(batch);
        assert_eq!(resumed.bits(), saved.bits(), "after batch {batch}");
    }
    Ok(())
}

#[test]
fn candles_sgd_is_complete() -> Outcome {
    let dir = tempfile::tempdir()?;
    let mut saved = Run::new(1, sgd(0.1));
    saved.step(0);
    saved.optimizer.set_learning_rate(0.3);
    saved.step(1);
    saved.save(&file(&dir));
    let mut resumed = Run::new(2, sgd(0.7));
    resumed.resume(&file(&dir))?;
    assert_eq!(resumed.optimizer.learning_rate(), 0.3);
    for batch in 2..5 {
        saved.step(batch);
        resumed.step(batch);
        assert_eq!(resumed.bits(), saved.bits(), "after batch {batch}");
    }
    Ok(())
}

#[test]
fn candles_adamw_begins_with_fresh_moments_and_says_so() -> Outcome {
    let dir = tempfile::tempdir()?;
    let mut saved = Run::new(1, candles_adamw(0.1));
    saved.optimizer.set_params(ParamsAdamW {
        lr: 0.05,
        beta1: 0.8,
        beta2: 0.9,
        eps: 1e-6,
        weight_decay: 0.2,
    });
    saved.step(0);
    saved.step(1);
    saved.save(&file(&dir));
    let mut resumed = Run::new(2, candles_adamw(0.7));
    let texts = warnings(|| {
        resumed.resume(&file(&dir)).unwrap();
    });
    let said = texts.iter().filter(|text| text.contains("start from zero"));
    assert_eq!(said.count(), 1, "{texts:?}");
    let params = resumed.optimizer.params();
    assert_eq!((params.lr, params.beta1, params.beta2), (0.05, 0.8, 0.9));
    assert_eq!((params.eps, params.weight_decay), (1e-6, 0.2));
    assert_eq!(resumed.bits(), saved.bits());
    // As an optimizer made anew over the variables that were saved.
    let mut other = Run::new(3, candles_adamw(0.7));
    other.resume(&file(&dir))?;
    for batch in 2..5 {
        resumed.step(batch);
        other.step(batch);
    }
    assert_eq!(resumed.bits(), other.bits());
    Ok(())
}

/// SGD with momentum, as a user would write it.
struct Momentum {
    lr: f64,
    vars: Vec<(String, Var)>,
    velocity: Vec<Tensor>,
}

const KIND: &str = "tests.Momentum";

impl Momentum {
    fn new(vars: &VarMap) -> Self {
        let vars = named(vars);
        let velocity = vars.iter().map(|(_, var)| var.zeros_like().unwrap());
        Self {
            lr: 0.1,
            velocity: velocity.collect(),
            vars,
        }
    }

    fn apply(&mut self, grads: &GradStore) {
        for ((_, var), velocity) in self.vars.iter().zip(&mut self.velocity) {
            let grad = grads.get(var).unwrap();
            *velocity = ((&*velocity * 0.9).unwrap() + grad).unwrap();
            var.set(&(var.as_tensor() - (&*velocity * self.lr).unwrap()).unwrap())
                .unwrap();
        }
    }
}

impl ResumableOptimizer for Momentum {
    fn optimizer_state(&self) -> Result<OptimizerState, OptimError> {
        let velocity = self.vars.iter().zip(&self.velocity);
        let velocity = velocity.map(|((name, _), v)| (format!("{name}.velocity"), v.clone()));
        OptimizerState::new(KIND)
            .with_tensors(velocity)
            .with_hyperparameters(json!({ "lr": self.lr }))
    }

    fn load_optimizer_state(&mut self, state: &OptimizerState) -> Result<(), OptimError> {
        state.check_kind(KIND)?;
        let numbers = state.hyperparameters::<Value>()?.unwrap_or_default();
        let mut velocity = vec![];
        for (name, var) in &self.vars {
            let name = format!("{name}.velocity");
            velocity.push(state.tensor(&name, var.dtype(), var.shape())?.clone());
        }
        state.check_names(self.vars.iter().map(|(name, _)| format!("{name}.velocity")))?;
        self.velocity = velocity;
        self.lr = numbers["lr"].as_f64().unwrap_or(self.lr);
        Ok(())
    }
}

#[test]
fn an_optimizer_of_ones_own_resumes_bit_for_bit() -> Outcome {
    let dir = tempfile::tempdir()?;
    let mut saved = Run::new(1, Momentum::new);
    saved.optimizer.lr = 0.07;
    let step = |run: &mut Run<Momentum>, batch| {
        let grads = run.grads(batch);
        run.optimizer.apply(&grads);
    };
    for batch in 0..3 {
        step(&mut saved, batch);
    }
    saved.save(&file(&dir));
    let mut resumed = Run::new(2, Momentum::new);
    // Also where its type is not known.
    let optimizer: &mut dyn ResumableOptimizer = &mut resumed.optimizer;
    resume_training(
        file(&dir),
        &resumed.fc,
        &resumed.vars,
        optimizer,
        Some(&recipe()),
    )?;
    assert_eq!(resumed.optimizer.lr, 0.07);
    for batch in 3..6 {
        step(&mut saved, batch);
        step(&mut resumed, batch);
        assert_eq!(resumed.bits(), saved.bits(), "after batch {batch}");
    }
    Ok(())
}

/// The texts of the warnings of `f`, on this thread.
fn warnings(f: impl FnOnce()) -> Vec<String> {
    let kept = Warnings::default();
    tracing::subscriber::with_default(kept.clone(), f);
    kept.texts()
}
