//! A training run that can be saved and resumed.

use candle_core::{DType, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::checkpoint::{TrainingMeta, fp8_state, resume_training, save_training};
use fp8::config::Recipe;
use fp8::optim::{AdamW, AdamWConfig, LrSchedule};
use fp8::{Autocast, Error, fp8_autocast};
use fp8_test_support::{Mlp, bits, delayed, device, fill, prepare, recipes, tensor};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub const STEPS: u64 = 12;
pub const SAVED_AT: u64 = 5;

/// Variations of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Style {
    Plain,
    /// Every step is followed by an evaluation.
    Validation,
    /// Two micro-batches per step under one guard.
    OneGuard,
    /// Two micro-batches per step, each under its own guard.
    GuardEach,
    /// The optimizer does not have the weight of the first layer.
    Frozen,
    /// A gradient that is not finite makes the optimizer skip the step before the checkpoint.
    Skipped,
    /// The learning rate falls to 0 before the checkpoint, so weights stay as they are.
    Standstill,
}

/// The state of a training program.
pub struct Run {
    pub vars: VarMap,
    pub mlp: Mlp,
    pub optimizer: AdamW,
    pub recipe: Option<Recipe>,
    pub style: Style,
    pub step: u64,
}

impl Run {
    pub fn new(seed: u64, recipe: Option<Recipe>, style: Style) -> Self {
        let vars = VarMap::new();
        let mut mlp = Mlp::new(VarBuilder::from_varmap(&vars, DType::F32, &device())).unwrap();
        fill(&vars, seed);
        if recipe.is_some() {
            assert_eq!(prepare(&mut mlp).converted(), 2);
        }
        let config = AdamWConfig {
            weight_decay: 0.1,
            max_grad_norm: Some(1.),
            ..Default::default()
        };
        let mut named: Vec<_> = vars
            .data()
            .lock()
            .unwrap()
            .iter()
            .map(|(name, var)| (name.clone(), var.clone()))
            .collect();
        if style == Style::Frozen {
            named.retain(|(name, _)| name != "up.weight");
        }
        let optimizer = AdamW::from_named(named, config).unwrap();
        Self {
            vars,
            mlp,
            optimizer,
            recipe,
            style,
            step: 0,
        }
    }

    pub fn guard(&self, training: bool) -> Option<fp8::AutocastGuard> {
        let recipe = self.recipe.clone()?;
        Some(fp8_autocast(Autocast::new(recipe).training(training)).unwrap())
    }

    pub fn loss(&self, batch: u64) -> Tensor {
        // The amaxes rise and fall, so that histories matter.
        let size = 1. + (batch % 5) as f64;
        let x = (tensor(1000 + batch, &[8, Mlp::IN]) * size).unwrap();
        let y = tensor(2000 + batch, &[8, Mlp::OUT]);
        (self.mlp.forward(&x).unwrap() - y)
            .unwrap()
            .sqr()
            .unwrap()
            .mean_all()
            .unwrap()
    }

    /// Takes one optimizer step and returns the bits of its losses: those of training, then that of validation.
    pub fn train(&mut self) -> Vec<u32> {
        let schedule = LrSchedule::cosine(2e-2, 3, STEPS);
        let still = self.style == Style::Standstill && (3..8).contains(&self.step);
        self.optimizer
            .set_lr(if still { 0. } else { schedule.lr(self.step) })
            .unwrap();
        let losses: Vec<Tensor> = match self.style {
            Style::OneGuard => {
                let _guard = self.guard(true);
                [2 * self.step, 2 * self.step + 1]
                    .map(|batch| self.loss(batch))
                    .into()
            }
            Style::GuardEach => [2 * self.step, 2 * self.step + 1]
                .map(|batch| {
                    let _guard = self.guard(true);
                    self.loss(batch)
                })
                .into(),
            _ => {
                let _guard = self.guard(true);
                vec![self.loss(self.step)]
            }
        };
        let total = losses
            .iter()
            .cloned()
            .reduce(|a, b| (a + b).unwrap())
            .unwrap();
        let skip = self.style == Style::Skipped && self.step + 1 == SAVED_AT;
        let total = if skip {
            (total * f64::INFINITY).unwrap()
        } else {
            total
        };
        let report = self.optimizer.apply(&total.backward().unwrap()).unwrap();
        assert_eq!(report.skipped().unwrap(), skip, "step {}", self.step);
        self.step += 1;
        let mut all: Vec<u32> = losses.iter().flat_map(bits).collect();
        if self.style == Style::Validation {
            let _guard = self.guard(false);
            all.extend((0..2).flat_map(|i| bits(&self.loss(500 + i))));
        }
        all
    }

    pub fn meta(&self) -> TrainingMeta {
        TrainingMeta {
            step: self.step,
            recipe: self.recipe.clone(),
            random: json!({"seed": u64::MAX, "drawn": self.step}),
            extra: json!({"width": [Mlp::IN, Mlp::HIDDEN]}),
        }
    }

    pub fn save(&self, path: &Path) {
        save_training(path, &self.mlp, &self.vars, &self.optimizer, &self.meta()).unwrap();
    }

    pub fn resume(&mut self, path: &Path) -> Result<TrainingMeta, Error> {
        let recipe = self.recipe.clone();
        let meta = resume_training(
            path,
            &self.mlp,
            &self.vars,
            &mut self.optimizer,
            recipe.as_ref(),
        )?;
        self.step = meta.step;
        Ok(meta)
    }

    /// The bits of everything that a checkpoint may change.
    pub fn everything(&self) -> BTreeMap<String, Vec<u32>> {
        let mut all = BTreeMap::new();
        for (name, var) in self.vars.data().lock().unwrap().iter() {
            all.insert(name.clone(), bits(var.as_tensor()));
        }
        for (name, row) in fp8_state(&self.mlp).unwrap() {
            let mut bits: Vec<u32> = row.amax_history.iter().map(|x| x.to_bits()).collect();
            bits.push(row.quant_scale.to_bits());
            bits.push(row.dequant_scale.to_bits());
            bits.push(row.calibrated_amax.map_or(0, f32::to_bits));
            bits.push(row.format.map_or(0, |format| format as u32 + 1));
            bits.extend([row.non_finite, row.id]);
            bits.extend(row.draws.values());
            all.insert(name, bits);
        }
        for (name, tensor) in self.optimizer.state().unwrap() {
            all.insert(format!("optimizer/{name}"), bits(&tensor));
        }
        all
    }
}

pub fn file(dir: &tempfile::TempDir) -> PathBuf {
    dir.path().join("checkpoint.safetensors")
}

pub fn all_recipes() -> Vec<(String, Option<Recipe>)> {
    let mut all = vec![("f32".to_string(), None)];
    all.extend(
        recipes()
            .into_iter()
            .map(|(name, r)| (name.to_string(), Some(r))),
    );
    let power = delayed(2)
        .with_amax_compute(fp8::fp8_core::AmaxCompute::MostRecent)
        .with_scale_rounding(fp8::fp8_core::ScaleRounding::PowerOfTwo);
    all.push(("delayed, most recent".into(), Some(power.into())));
    all
}

/// The same variables, FP8 state and optimizer state, or a panic that names the first tensor that differs.
#[track_caller]
pub fn assert_everything(case: &str, got: &Run, expected: &Run) {
    let (got, expected) = (got.everything(), expected.everything());
    let names = |all: &BTreeMap<String, Vec<u32>>| all.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&got), names(&expected), "{case}: names");
    for (name, bits) in &expected {
        assert!(got[name] == *bits, "{case}: {name}");
    }
}
