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
    /// The optimizer's or candle's; the count and the loss scale stay as they were. The error after too many skipped steps in a row
    /// ([`LossScalerConfig::max_skipped_steps`](crate::optim::LossScalerConfig::max_skipped_steps)) is an exception: the step is not
    /// counted, but the loss scale has backed off.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::optim::{LossScalerConfig, OptimError, Sgd, SgdConfig};
    use crate::{nn, with_fp8};
    use candle_core::{DType, Device, Module, Var};
    use candle_nn::{VarBuilder, VarMap};

    /// An optimizer of which every step is an error.
    struct Failing(Vec<(String, Var)>);

    impl NamedOptimizer for Failing {
        fn named_vars(&self) -> Vec<(String, Var)> {
            self.0.clone()
        }

        fn apply_gradients(&mut self, _: &GradStore) -> Result<StepReport, OptimError> {
            Err(OptimError::Other("no step".into()))
        }
    }

    struct Run {
        vars: VarMap,
        model: nn::Linear,
        emulator: Emulator,
    }

    impl Run {
        fn new(scaler: LossScalerConfig) -> Result<Self> {
            let vars = VarMap::new();
            let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
            let model = nn::linear(8, 2, vb.pp("fc"))?;
            let options = EmulatorOptions::default().with_loss_scaler(scaler);
            let emulator = Emulator::initialize(&model, EmulationMethod::ScaledHybrid, options)?;
            Ok(Self {
                vars,
                model,
                emulator,
            })
        }

        fn loss(&self, factor: f64) -> Result<Tensor> {
            let x = Tensor::full(0.1f32, (4, 8), &Device::Cpu)?;
            let y = with_fp8(self.emulator.autocast(), || self.model.forward(&x))?;
            Ok((y.sqr()?.mean_all()? * factor)?)
        }
    }

    #[test]
    fn an_error_of_the_optimizer_changes_neither_count_nor_scale() -> Result<()> {
        let mut run = Run::new(LossScalerConfig::default().with_growth_interval(1))?;
        let var = run.vars.all_vars().remove(0);
        let mut failing = Failing(vec![("one".to_string(), var)]);
        run.emulator.update_global_steps(7);
        let before = run.emulator.loss_scaler().state();
        let loss = run.loss(1.)?;
        let mut grads = run.emulator.loss_scaler().scaled(&loss)?.backward()?;
        let emulator = &mut run.emulator;
        for error in [
            emulator.optimizer_step(&mut failing, &loss).unwrap_err(),
            (emulator.optimizer_step_with_grads(&mut failing, &mut grads)).unwrap_err(),
        ] {
            assert!(
                matches!(error, Error::Optim(OptimError::Other(_))),
                "{error}"
            );
        }
        let after = (emulator.global_steps(), emulator.loss_scaler().state());
        assert_eq!(after, (7, before));
        Ok(())
    }

    #[test]
    fn one_skipped_step_too_many_lowers_the_scale_and_is_not_counted() -> Result<()> {
        let scaler = LossScalerConfig::default()
            .with_initial_loss_scale(4.)
            .with_max_skipped_steps(2);
        let mut run = Run::new(scaler)?;
        let mut sgd = Sgd::from_varmap(&run.vars, SgdConfig::default())?;
        let mut step = |run: &mut Run| {
            let loss = run.loss(f64::INFINITY)?;
            let done = run.emulator.optimizer_step(&mut sgd, &loss);
            let scale = run.emulator.loss_scaler().loss_scale();
            let steps = run.emulator.global_steps();
            Ok::<_, Error>((done.map(|step| step.skipped()), scale, steps))
        };
        let (done, scale, steps) = step(&mut run)?;
        assert_eq!((done?, scale, steps), (true, 2., 1));
        let (done, scale, steps) = step(&mut run)?;
        let error = done.unwrap_err();
        assert!(
            matches!(
                error,
                Error::Optim(OptimError::TooManySkipped { steps: 2, .. })
            ),
            "{error}"
        );
        assert_eq!((scale, steps), (1., 1));
        Ok(())
    }
}
