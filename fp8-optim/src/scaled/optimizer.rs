//! Optimizers of scaled parameters: construction and one step.

use std::collections::HashSet;

use fp8_candle::profile;
use fp8_scaled::{ScaledGrads, ScaledVar};

use super::super::counter::Counter;
use super::super::engine::{Decision, Engine};
use super::super::error::{OptimError, Result};
use super::super::moments::MomentStorage;
use super::super::report::StepReport;
use super::super::rounding::{RoundTo, ScaledCounts};
use super::super::rule::checked_settings;
use super::super::shared::Shared;
use super::super::state::ResumableOptimizer;
use super::super::veto::CastVeto;
use super::grad::Grad;
use super::parameter::ScaledParameter;
use super::rule::ScaledRule;

/// An optimizer of scaled parameters: [`ScaledSgd`](super::ScaledSgd), [`ScaledAdamW`](super::ScaledAdamW), or your own, which
/// `scaled::save_training` accepts too.
///
/// In your own `apply`, read values in f32 with `to_tensor`, and store new ones with [`ScaledVar::set_rescaled`], which chooses their scale
/// and drops FP8 copies, or with [`ScaledVar::set`] at a scale of your choice. Put everything that is kept between steps into the state.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fp8_scaled::{ScaledGrads, ScaledVar};
/// use fp8_optim::scaled::ScaledOptimizer;
/// use fp8_optim::{ResumableOptimizer, OptimError, OptimizerState, StepReport};
///
/// /// `momentum = beta * momentum + (1 - beta) * gradient; variable -= lr * sign(momentum)`
/// struct SignMomentum {
///     vars: Vec<(ScaledVar, Tensor)>,
///     lr: f64,
///     beta: f64,
///     steps: u64,
/// }
///
/// impl ScaledOptimizer for SignMomentum {
///     fn apply(&mut self, grads: &ScaledGrads) -> Result<StepReport, OptimError> {
///         let mut next = vec![];
///         let mut squares = 0f64;
///         for (at, (var, momentum)) in self.vars.iter().enumerate() {
///             let Some(grad) = grads.get(var) else { continue };
///             let grad = grad.to_tensor(DType::F32)?;
///             squares += f64::from(grad.sqr()?.sum_all()?.to_scalar::<f32>()?);
///             let momentum = ((momentum * self.beta)? + (grad * (1. - self.beta))?)?;
///             let change = (momentum.sign()? * self.lr)?;
///             next.push((at, (var.value().to_tensor(DType::F32)? - change)?, momentum));
///         }
///         // Nothing has changed so far.
///         if !squares.is_finite() {
///             return Ok(StepReport::skipped_step(self.lr, next.len(), squares.sqrt(), self.steps));
///         }
///         let updated = next.len();
///         for (at, value, momentum) in next {
///             self.vars[at].0.set_rescaled(&value)?;
///             self.vars[at].1 = momentum;
///         }
///         self.steps += 1;
///         Ok(StepReport::taken(self.lr, updated, squares.sqrt(), 1.))
///     }
///
///     fn lr(&self) -> f64 {
///         self.lr
///     }
///
///     fn set_lr(&mut self, lr: f64) -> Result<(), OptimError> {
///         self.lr = lr;
///         Ok(())
///     }
///
///     fn steps(&self) -> u64 {
///         self.steps
///     }
/// }
///
/// impl ResumableOptimizer for SignMomentum {
///     fn optimizer_state(&self) -> Result<OptimizerState, OptimError> {
///         let numbers = (self.lr, self.beta, self.steps);
///         let mut state = OptimizerState::new("my_crate.SignMomentum").with_hyperparameters(numbers)?;
///         for (var, momentum) in &self.vars {
///             state = state.with_tensor(format!("{}.momentum", var.name()), momentum.clone());
///         }
///         Ok(state)
///     }
///
///     fn load_optimizer_state(&mut self, state: &OptimizerState) -> Result<(), OptimError> {
///         state.check_kind("my_crate.SignMomentum")?;
///         let numbers: Option<(f64, f64, u64)> = state.hyperparameters()?;
///         let name = |var: &ScaledVar| format!("{}.momentum", var.name());
///         state.check_names(self.vars.iter().map(|(var, _)| name(var)))?;
///         let mut momenta = vec![];
///         for (var, _) in &self.vars {
///             momenta.push(state.tensor(&name(var), DType::F32, &var.dims().into())?);
///         }
///         for ((_, own), momentum) in self.vars.iter_mut().zip(momenta) {
///             *own = momentum.clone();
///         }
///         if let Some((lr, beta, steps)) = numbers {
///             (self.lr, self.beta, self.steps) = (lr, beta, steps);
///         }
///         Ok(())
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let w = ScaledVar::new("w", &Tensor::ones(4, DType::F16, &Device::Cpu)?)?;
/// let momentum = Tensor::zeros(4, DType::F32, &Device::Cpu)?;
/// let mut optimizer: Box<dyn ScaledOptimizer> =
///     Box::new(SignMomentum { vars: vec![(w.clone(), momentum)], lr: 0.125, beta: 0.9, steps: 0 });
/// for _ in 0..4 {
///     let report = optimizer.apply(&w.value().sum_all()?.backward()?)?;
///     assert_eq!((report.updated, report.grad_norm()?), (1, 2.));
/// }
/// assert_eq!(w.value().to_vec1()?, [0.5; 4]);
/// let state = optimizer.optimizer_state()?;
/// optimizer.load_optimizer_state(&state)?;
/// assert_eq!(optimizer.steps(), 4);
/// # Ok(()) }
/// ```
pub trait ScaledOptimizer: ResumableOptimizer {
    /// One step with these gradients: clips, updates every variable that has a gradient, and says what it did. Variables without a
    /// gradient are left alone. Gradients with NaN or an infinity change nothing, and the report says so.
    ///
    /// # Errors
    /// A gradient of another shape or device than its variable, or of f64, before anything is changed.
    fn apply(&mut self, grads: &ScaledGrads) -> Result<StepReport>;

    /// The learning rate of the next step.
    fn lr(&self) -> f64;

    /// Sets the learning rate of the next step.
    ///
    /// # Errors
    /// [`OptimError::InvalidHyperparameter`] if `lr` is NaN, infinite or negative; the old one stays.
    fn set_lr(&mut self, lr: f64) -> Result<()>;

    /// Steps taken, skipped ones not counted.
    fn steps(&self) -> u64;

    /// What rounding and rescaling have done so far; nothing is counted unless overridden.
    fn counts(&self) -> ScaledCounts {
        ScaledCounts::default()
    }
}

/// Optimizers of scaled parameters.
impl<R: ScaledRule> Engine<R, ScaledParameter> {
    /// An optimizer of all these parameters, for example those of a `&ScaledVarMap`.
    ///
    /// # Errors
    /// As [`Engine::from_vars`].
    pub fn new(params: impl Into<Vec<ScaledVar>>, config: R) -> Result<Self> {
        Self::from_vars(params.into(), config)
    }

    /// An optimizer of these parameters, ordered by name; clones of one parameter are one. It rounds at random with the seed of the
    /// configuration.
    ///
    /// # Errors
    /// [`OptimError::InvalidHyperparameter`], [`OptimError::DuplicateName`], [`OptimError::ScaledMasters`] if the configuration asks for
    /// master weights, [`OptimError::ScaledMoments`] if it asks for FP8 moments, [`OptimError::ScaledDtype`] for f64, [`OptimError::ScaledDevice`].
    pub fn from_vars(mut vars: Vec<ScaledVar>, config: R) -> Result<Self> {
        let settings = checked_settings(&config)?;
        if settings.moments != MomentStorage::F32 {
            return Err(OptimError::ScaledMoments);
        }
        if let Some(masters) = settings.masters {
            return Err(OptimError::ScaledMasters {
                dtype: masters.dtype(),
            });
        }
        vars.sort_by(|a, b| a.name().cmp(b.name()));
        let mut seen = HashSet::new();
        vars.retain(|var| seen.insert(var.data_var().id()));
        if let Some(pair) = (vars.windows(2)).find(|pair| pair[0].name() == pair[1].name()) {
            let name = pair[0].name().to_string();
            return Err(OptimError::DuplicateName { name });
        }
        let parameters = vars.into_iter().map(ScaledParameter::new::<R>);
        let parameters = parameters.collect::<Result<_>>()?;
        let seed = settings.seed;
        let shared = Shared {
            round: Some(RoundTo::Stochastic { seed }),
            ..Shared::default()
        };
        let counter = Counter::Host(0);
        Ok(Self::with_parameters(parameters, config, counter, shared))
    }

    /// Replaces the rounding.
    pub fn with_rounding(mut self, round: RoundTo) -> Self {
        self.shared.round = Some(round);
        self
    }

    /// The parameters, in the order of the updates.
    pub fn vars(&self) -> impl Iterator<Item = &ScaledVar> {
        self.slots.iter().map(|slot| &slot.parameter.var)
    }
}

impl<R: ScaledRule> ScaledOptimizer for Engine<R, ScaledParameter> {
    fn apply(&mut self, grads: &ScaledGrads) -> Result<StepReport> {
        let _scope = profile::enter(profile::Kind::Optimizer);
        let grads = self.gradients(grads)?;
        let updated = grads.iter().flatten().count();
        let squares: f64 = grads.iter().flatten().map(Grad::squares).sum();
        let grad_norm = squares.sqrt();
        match self.decide(grad_norm, updated, CastVeto::default())? {
            Decision::Skip(report) => Ok(report),
            Decision::Take { step, clip } => {
                self.update_each(&grads, step, clip, |_| true)?;
                Ok(self.taken(updated, grad_norm, clip))
            }
        }
    }

    fn lr(&self) -> f64 {
        Engine::lr(self)
    }

    fn set_lr(&mut self, lr: f64) -> Result<()> {
        Engine::set_lr(self, lr)
    }

    fn steps(&self) -> u64 {
        self.counter.on_host()
    }

    fn counts(&self) -> ScaledCounts {
        self.shared.counts
    }
}
