//! A model in training: its optimizer, its recipe and its place in the schedule.

mod fits;
mod origin;
mod validation;

use super::config::TrainerConfig;
use super::error::{Error, NotFinite, Result};
use super::learner::{Learner, StepRecord};
use super::objective::{Objective, Part};
use crate::checkpoint::training_meta;
use crate::optim::{AdamW, StepReport};
use crate::{
    Autocast, AutocastGuard, CastStats, Fp8Module, GradAccumulator, PrepareReport, Recipe,
    StatsReport, StepSummary, TrainState, check_gradients, fp8_autocast,
};
use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor};
use candle_nn::VarMap;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Instant;

/// Steps in a row that may be skipped because of gradients that are not finite.
const MOST_SKIPPED: u32 = 20;

/// A model `M` that learns an [`Objective`] by AdamW, in high precision or under a recipe.
///
/// Each step makes the gradients of all micro-batches, weighted by their targets, and applies their mean. [`train`](super::train) drives it, or
/// you call [`Learner::train_step`] yourself.
pub struct Trainer<M, T> {
    name: String,
    state: TrainState<M, AdamW>,
    objective: T,
    config: TrainerConfig,
    device: Device,
    checkpoint: Option<PathBuf>,
    /// The step of the checkpoint that this trainer wrote or read last.
    saved: Option<u64>,
    unread: Vec<Unread>,
    skipped: u32,
    gradients_checked: bool,
    stats: CastStats,
    /// The accuracy of the last validation.
    accuracy: Option<f64>,
}

/// The origin of Inf or NaN that no parameter holds.
const UNKNOWN: &str = "the forward or the backward pass: all parameters are finite";

/// A step whose results the device may not have finished yet.
struct Unread {
    step: u64,
    /// The sum of losses, each times its targets.
    loss: Tensor,
    targets: usize,
    tokens: usize,
    lr: f64,
    report: StepReport,
    summary: Option<StepSummary>,
    /// Milliseconds of the host.
    ms: f64,
}

impl<M: Fp8Module, T: Objective<M>> Trainer<M, T> {
    /// Trains `vars`, the variables of `model`, for `objective`. `name` stands in metrics and messages. With a recipe the model is prepared.
    ///
    /// # Errors
    /// [`Error::Setting`], and what [`TrainState::create`] finds.
    pub fn new(
        name: impl Into<String>,
        model: M,
        vars: VarMap,
        objective: T,
        config: TrainerConfig,
    ) -> Result<Self> {
        config.check()?;
        let device = (vars.all_vars().first()).map_or(Device::Cpu, |var| var.device().clone());
        let tx = |vars: &VarMap| AdamW::from_varmap(vars, config.optimizer.clone());
        let prepare = config.prepare.clone().unwrap_or_default();
        let state = TrainState::create(model, vars, config.recipe.clone(), &prepare, tx)?;
        Ok(Self {
            name: name.into(),
            state,
            objective,
            config,
            device,
            checkpoint: None,
            saved: None,
            unread: vec![],
            skipped: 0,
            gradients_checked: false,
            stats: CastStats::default(),
            accuracy: None,
        })
    }

    /// Writes checkpoints to this file, and resumes from it.
    pub fn with_checkpoint(mut self, path: impl Into<PathBuf>) -> Self {
        self.checkpoint = Some(path.into());
        self
    }

    /// The model.
    pub fn model(&self) -> &M {
        self.state.model()
    }

    /// The model, to change its settings; its parameters are those of [`Trainer::vars`].
    pub fn model_mut(&mut self) -> &mut M {
        self.state.model_mut()
    }

    /// The variables.
    pub fn vars(&self) -> &VarMap {
        self.state.vars()
    }

    /// What is learned.
    pub fn objective(&self) -> &T {
        &self.objective
    }

    /// What the preparation did with each layer; None without a recipe.
    pub fn report(&self) -> Option<&PrepareReport> {
        self.state.report()
    }

    /// Restores the run from its checkpoint, so that it continues to the bit. False if there is none: a run that was stopped before its
    /// first checkpoint starts over.
    ///
    /// # Errors
    /// [`Error::OtherRun`] for a checkpoint of other settings, [`Error::Io`] if it cannot be seen whether there is one, and as
    /// [`TrainState::resume`]; nothing is changed then.
    pub fn resume(&mut self) -> Result<bool> {
        let Some(path) = self.checkpoint.clone() else {
            return Ok(false);
        };
        // Only a path that is absent means that there is none: not one that cannot be seen now, or a link to a disk that is not mounted.
        match path.symlink_metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            Err(source) => {
                let action = "look for the checkpoint";
                return Err(Error::Io {
                    path,
                    action,
                    source,
                });
            }
            Ok(_) => {}
        }
        let fixed = self.config.fixed(self.objective.fingerprint());
        fits::fits(&path, &training_meta(&path)?.extra, &fixed)?;
        self.state.resume(&path)?;
        self.saved = Some(self.state.step());
        Ok(true)
    }

    /// The recipe of a step, counted from 1.
    fn recipe(&self, step: u64) -> Option<&Recipe> {
        let last = self.config.last_recipe_step;
        let recipe = self.config.recipe.as_ref();
        recipe.filter(|_| last.is_none_or(|last| step <= last))
    }

    fn guard(&self, part: usize) -> Result<Option<AutocastGuard>> {
        let next = self.state.step() + 1;
        let Some(recipe) = self.recipe(next) else {
            return Ok(None);
        };
        let autocast = Autocast::new(recipe.clone()).micro_batch(part as u32);
        let measures = (self.config.stats_every).is_some_and(|n| next.is_multiple_of(n));
        let autocast = match measures {
            true => autocast.with_stats(&self.stats),
            false => autocast,
        };
        Ok(Some(fp8_autocast(autocast)?))
    }

    /// The gradients of a step. After an error it leaves no trace in the FP8 state.
    fn gradients(&self) -> Result<Gradients> {
        let (guard, step) = (self.guard(0)?, self.state.step());
        match (self.parts(step).and_then(|sum| self.checked(sum)), guard) {
            (Ok(mut sum), guard) => {
                sum.summary = guard.map(AutocastGuard::close).transpose()?;
                Ok(sum)
            }
            (Err(error), guard) => {
                if let Some(guard) = guard {
                    guard.abort();
                }
                Err(error)
            }
        }
    }

    /// Fails if a parameter has no gradient in the first step.
    fn checked(&self, sum: Gradients) -> Result<Gradients> {
        if let (false, Some(grads)) = (self.gradients_checked, &sum.grads) {
            let mut parameters = check_gradients(self.state.vars(), grads);
            parameters.retain(|name| !self.objective.may_be_idle(name));
            if !parameters.is_empty() {
                return Err(Error::NoGradient {
                    name: self.name.clone(),
                    parameters,
                });
            }
        }
        Ok(sum)
    }

    /// The gradients of all micro-batches of a step, counted from 0, in its guard.
    fn parts(&self, step: u64) -> Result<Gradients> {
        let parts = self.config.micro_batches;
        let mut sum = Gradients::default();
        let mut accumulator = GradAccumulator::new(self.state.vars());
        for index in 0..parts {
            let batch = (self.objective).micro_batch(step, Part::new(index, parts))?;
            let targets = self.objective.targets(&batch);
            if targets == 0 {
                continue;
            }
            let inner = match parts {
                1 => None,
                _ => self.guard(index)?,
            };
            let loss = self.objective.loss(self.state.model(), &batch)?;
            let grads = crate::backward(&loss)?;
            drop(inner);
            sum.add(&loss, targets, self.objective.tokens(&batch))?;
            match parts {
                1 => sum.grads = Some(grads),
                _ => accumulator.add_weighted(grads, targets as f64)?,
            }
        }
        if sum.targets == 0 {
            return Err(Error::EmptyBatch { step: step + 1 });
        }
        if parts > 1 {
            sum.grads = Some(accumulator.finish_mean()?);
        }
        Ok(sum)
    }

    /// Whether the run ends with this step because of gradients that are not finite.
    fn ends_by_skips(&self, unread: &Unread) -> Result<bool> {
        Ok(self.skipped + 1 >= MOST_SKIPPED && unread.report.skipped()?)
    }
}

#[derive(Default)]
struct Gradients {
    grads: Option<GradStore>,
    loss: Option<Tensor>,
    targets: usize,
    tokens: usize,
    summary: Option<StepSummary>,
}

impl Gradients {
    fn add(&mut self, loss: &Tensor, targets: usize, tokens: usize) -> Result<()> {
        let loss = (loss.detach().to_dtype(candle_core::DType::F32)? * targets as f64)?;
        self.loss = Some(match self.loss.take() {
            Some(sum) => (sum + loss)?,
            None => loss,
        });
        self.targets += targets;
        self.tokens += tokens;
        Ok(())
    }
}

impl<M: Fp8Module, T: Objective<M>> Learner for Trainer<M, T> {
    type Error = Error;

    fn name(&self) -> &str {
        &self.name
    }

    fn step(&self) -> u64 {
        self.state.step()
    }

    fn train_step(&mut self) -> Result<()> {
        let begin = Instant::now();
        let lr = self.config.schedule.lr(self.state.step());
        let mut made = self.gradients()?;
        let (Some(grads), Some(loss)) = (made.grads.take(), made.loss.take()) else {
            return Err(Error::EmptyBatch {
                step: self.state.step() + 1,
            });
        };
        self.gradients_checked = true;
        self.state.optimizer_mut().set_lr(lr)?;
        let report = self.state.apply_gradients(&grads)?;
        self.unread.push(Unread {
            step: self.state.step(),
            loss,
            targets: made.targets,
            tokens: made.tokens,
            lr,
            report,
            summary: made.summary,
            ms: begin.elapsed().as_secs_f64() * 1e3,
        });
        Ok(())
    }

    fn read_steps(&mut self) -> Result<Vec<StepRecord>> {
        let mut unread = std::mem::take(&mut self.unread);
        if unread.is_empty() {
            return Ok(vec![]);
        }
        let begin = Instant::now();
        let losses: Vec<&Tensor> = unread.iter().map(|step| &step.loss).collect();
        let losses = Tensor::stack(&losses, 0)?.to_vec1::<f32>()?;
        // A device that runs behind the host has finished all of these steps by now; only their mean time is known.
        let waited = begin.elapsed().as_secs_f64() * 1e3;
        let host: f64 = unread.iter().map(|step| step.ms).sum();
        let mean = (host + waited) / unread.len() as f64;
        let mut records: Vec<StepRecord> = vec![];
        for (index, sum) in losses.into_iter().enumerate() {
            let step = &unread[index];
            let loss = f64::from(sum) / step.targets as f64;
            let ends = !loss.is_finite() || self.ends_by_skips(step)?;
            if ends && !records.is_empty() {
                // The steps before it are reported first; the next call fails.
                self.unread = unread.split_off(index);
                return Ok(records);
            }
            let unread = step;
            if !loss.is_finite() {
                return Err(self.not_finite(unread, NotFinite::Loss)?);
            }
            self.skipped = match unread.report.skipped()? {
                true => self.skipped + 1,
                false => 0,
            };
            if self.skipped >= MOST_SKIPPED {
                return Err(self.not_finite(unread, NotFinite::Gradients(MOST_SKIPPED))?);
            }
            records.push(StepRecord {
                step: unread.step,
                loss,
                lr: unread.lr,
                grad_norm: Some(unread.report.grad_norm()?),
                ms: match self.device.is_cpu() {
                    true => unread.ms,
                    false => mean,
                },
                tokens: unread.tokens,
            });
        }
        Ok(records)
    }

    fn reading_waits(&self) -> bool {
        !self.device.is_cpu()
    }

    fn validate(&mut self) -> Result<Option<f64>> {
        self.validate_by(self.recipe(self.step()).cloned())
    }

    fn accuracy(&self) -> Option<f64> {
        self.accuracy
    }

    fn save(&mut self) -> Result<()> {
        let Some(path) = &self.checkpoint else {
            return Ok(());
        };
        self.state.extra = self.config.fixed(self.objective.fingerprint());
        self.state.save(path)?;
        self.saved = Some(self.state.step());
        Ok(())
    }

    fn take_stats(&mut self) -> Option<StatsReport> {
        Some(self.stats.take()).filter(|report| !report.rows.is_empty())
    }
}

impl<M, T> std::fmt::Debug for Trainer<M, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trainer")
            .field("name", &self.name)
            .field("state", &self.state)
            .field("checkpoint", &self.checkpoint)
            .finish_non_exhaustive()
    }
}
