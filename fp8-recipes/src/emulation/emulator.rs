//! The emulator: a prepared model, a recipe, a loss scaler and statistics.

use super::options::{EmulationMethod, EmulatorOptions};
use crate::autocast::Autocast;
use crate::config::{ConfigError, Fp8LinearConfig};
use crate::error::Result;
use crate::module::Fp8Module;
use crate::optim::{DynamicLossScaler, LossScaledStep, NamedOptimizer, StepReport};
use crate::prepare::{CastTable, PrepareOptions, PrepareReport, named, prepare_fp8};
use crate::stats::{CastStats, StatsLog};
use candle_core::Tensor;
use candle_core::backprop::GradStore;

/// A training run in emulated FP8: a prepared model, the recipe for its guards, a loss scaler and a count of steps.
///
/// A training checkpoint takes its loss scaler and its count with the optimizer: [`Emulator::with_optimizer`].
#[derive(Debug)]
pub struct Emulator {
    method: EmulationMethod,
    config: Fp8LinearConfig,
    report: PrepareReport,
    pub(super) loss_scaler: DynamicLossScaler,
    pub(super) global_steps: u64,
    measured: Option<Measured>,
}

impl Emulator {
    /// Prepares the layers and operators of `model` for `method`.
    ///
    /// # Errors
    /// [`ConfigError::UnmatchedPattern`] for a pattern that names no layer, with names that it may have meant; a malformed pattern; an
    /// invalid configuration of the loss scaler; and what [`prepare_fp8`] finds.
    pub fn initialize<M: Fp8Module + ?Sized>(
        model: &M,
        method: EmulationMethod,
        options: EmulatorOptions,
    ) -> Result<Self> {
        let mut prepare = PrepareOptions::default()
            .with_operators(true)
            .with_amax_history_len(1);
        for pattern in &options.exempt {
            prepare = prepare.with_off(pattern)?;
        }
        for pattern in &options.output_fused {
            prepare = prepare.with_output_fused(pattern)?;
        }
        let loss_scaler = DynamicLossScaler::new(options.loss_scaler.clone())?;
        // Before anything of the model changes.
        if let Some(first) = named(model, &prepare).unmatched.into_iter().next() {
            return Err(ConfigError::UnmatchedPattern {
                pattern: first.pattern,
                near: first.near,
            }
            .into());
        }
        let measured = Measured::new(&options);
        let report = prepare_fp8(model, &prepare)?;
        let config = Fp8LinearConfig::from_recipe_name(method.recipe_name())
            .with_seed(options.seed)
            .with_via_f16(options.via_f16);
        Ok(Self {
            method,
            config,
            report,
            loss_scaler,
            global_steps: 0,
            measured,
        })
    }

    /// Its method.
    pub fn method(&self) -> EmulationMethod {
        self.method
    }

    /// The options of the guards of this run: around each forward pass of training, and with `training(false)` of evaluation, which
    /// is not measured.
    pub fn autocast(&self) -> Autocast {
        let autocast = Autocast::new(self.config.clone());
        Autocast {
            training_stats: self.due().map(|measured| measured.stats.clone()),
            ..autocast
        }
    }

    /// The result of the preparation for each layer and operator.
    pub fn report(&self) -> &PrepareReport {
        &self.report
    }

    /// The casts of each prepared layer and operator.
    ///
    /// # Errors
    /// If the recipe of a layer is inconsistent.
    pub fn cast_table(&self) -> Result<CastTable> {
        Ok(self.report.cast_table(self.config.clone())?)
    }

    /// Steps taken, or set by [`Emulator::update_global_steps`].
    pub fn global_steps(&self) -> u64 {
        self.global_steps
    }

    /// Sets the number of finished steps of a resumed run, by which steps to measure are chosen.
    pub fn update_global_steps(&mut self, steps: u64) {
        self.global_steps = steps;
    }

    /// The measurements of the coming step, if it is measured.
    fn due(&self) -> Option<&Measured> {
        let measured = self.measured.as_ref();
        measured.filter(|measured| self.global_steps.is_multiple_of(measured.every))
    }

    /// Whether the coming step is measured.
    pub fn measures_this_step(&self) -> bool {
        self.due().is_some()
    }

    /// The log of [`EmulatorOptions::with_stats_log`], which holds the error if it could not be written.
    pub fn stats_log(&self) -> Option<&StatsLog> {
        self.measured.as_ref()?.log.as_ref()
    }

    /// Writes the measurements of the step under its number, and counts the step.
    fn end_step(&mut self) {
        if self.measures_this_step()
            && let Some(measured) = &mut self.measured
            && let Some(log) = &mut measured.log
        {
            log.record(self.global_steps, &measured.stats);
        }
        self.global_steps += 1;
    }

    /// The loss scaler: its current scale, and how many steps it has skipped.
    pub fn loss_scaler(&self) -> &DynamicLossScaler {
        &self.loss_scaler
    }

    /// The loss scaler, for example to load its state.
    pub fn loss_scaler_mut(&mut self) -> &mut DynamicLossScaler {
        &mut self.loss_scaler
    }

    /// Runs the backward pass of the scaled loss, divides the gradients, checks every element, and steps the optimizer unless one
    /// is Inf or NaN. Counts a step either way, and writes its statistics if it was measured.
    ///
    /// # Errors
    /// The optimizer's or candle's; the count and the loss scale stay as they were.
    pub fn optimizer_step<O: NamedOptimizer + ?Sized>(
        &mut self,
        optimizer: &mut O,
        loss: &Tensor,
    ) -> Result<LossScaledStep<StepReport>> {
        let step = self.loss_scaler.backward_step(loss, optimizer)?;
        self.end_step();
        Ok(step)
    }

    /// [`Emulator::optimizer_step`] from gradients that were computed before, of losses that [`DynamicLossScaler::scaled`] has
    /// scaled, such as their mean over micro-batches. `grads` are divided in place.
    ///
    /// # Errors
    /// As [`Emulator::optimizer_step`].
    pub fn optimizer_step_with_grads<O: NamedOptimizer + ?Sized>(
        &mut self,
        optimizer: &mut O,
        grads: &mut GradStore,
    ) -> Result<LossScaledStep<StepReport>> {
        let step = self.loss_scaler.apply(grads, optimizer)?;
        self.end_step();
        Ok(step)
    }
}

/// The statistics of measured steps, and their log.
#[derive(Debug)]
struct Measured {
    stats: CastStats,
    every: u64,
    log: Option<StatsLog>,
}

impl Measured {
    /// None if the options ask for no measurement.
    fn new(options: &EmulatorOptions) -> Option<Self> {
        if options.stats.is_none() && options.stats_log.is_none() {
            return None;
        }
        Some(Self {
            stats: options.stats.clone().unwrap_or_default(),
            every: options.stats_every.max(1),
            log: options.stats_log.as_ref().map(StatsLog::to_file),
        })
    }
}
