//! Dynamic loss scaling.

use std::collections::HashSet;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use fp8_candle::weight_version::WeightVersion;
use serde::{Deserialize, Serialize};

use super::error::Result;
use super::loss_scaler_config::{LossScalerConfig, check_loss_scale};
use super::unscale::Unscaled;
use super::veto::{CastVeto, JudgedSets, check_skips};

/// Multiplies the loss, so that small gradients are not rounded to 0 in the backward pass, and divides the gradients by the same factor. A
/// step with an infinite or NaN gradient element is skipped, and the loss scale backs off; after [`LossScalerConfig::growth_interval`]
/// clean steps in a row it grows.
///
/// Loss scales are powers of two: multiplying by them rounds nothing, short of overflow and underflow.
///
/// Works with any optimizer: this library's ([`DynamicLossScaler::backward_step`]), candle-nn's and your own
/// ([`DynamicLossScaler::step`]), or by hand with [`DynamicLossScaler::scaled`], [`DynamicLossScaler::unscale`] and
/// [`DynamicLossScaler::update`]. [`LossScaled`](super::LossScaled) keeps it in training checkpoints.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use candle_nn::{Optimizer, SGD};
/// use fp8_optim::DynamicLossScaler;
/// # fn main() -> candle_core::Result<()> {
/// let w = Var::ones(3, DType::F32, &Device::Cpu)?;
/// let mut optimizer = SGD::new(vec![w.clone()], 0.25)?;
/// let mut scaler = DynamicLossScaler::default();
/// let step = scaler.step(&w.sqr()?.sum_all()?, [&w], |grads| optimizer.step(grads))?;
/// assert!(!step.skipped());
/// assert_eq!(w.to_vec1::<f32>()?, [0.5; 3]);
///
/// // An overflow: the step is skipped, and the loss scale backs off.
/// let loss = (w.sqr()?.sum_all()? * f64::INFINITY)?;
/// let step = scaler.step(&loss, [&w], |grads| optimizer.step(grads))?;
/// assert!(step.skipped());
/// assert_eq!(w.to_vec1::<f32>()?, [0.5; 3]);
/// assert_eq!(scaler.loss_scale(), 32768.);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct DynamicLossScaler {
    config: LossScalerConfig,
    state: LossScalerState,
    judged: JudgedSets,
}

/// The state of a [`DynamicLossScaler`]: everything except its configuration that later steps depend on. It implements serde's traits, for
/// programs that write checkpoints of their own.
///
/// ```
/// use fp8_optim::DynamicLossScaler;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut first = DynamicLossScaler::default();
/// first.update(true);
/// let json = serde_json::to_string(&first.state())?;
/// let mut second = DynamicLossScaler::default();
/// second.load_state(&serde_json::from_str(&json)?)?;
/// assert_eq!((second.loss_scale(), second.skipped_steps()), (32768., 1));
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct LossScalerState {
    /// What the next loss is multiplied by.
    pub loss_scale: f64,
    /// Steps without a non-finite gradient since the loss scale last changed.
    pub clean_steps: u64,
    /// Steps skipped so far.
    pub skipped_steps: u64,
    /// Steps skipped since the last one that was taken.
    #[serde(default)]
    pub skipped_in_a_row: u64,
}

impl Default for DynamicLossScaler {
    fn default() -> Self {
        Self::with_valid(LossScalerConfig::default())
    }
}

impl DynamicLossScaler {
    /// A scaler at its initial loss scale.
    ///
    /// # Errors
    /// [`OptimError::InvalidHyperparameter`](super::OptimError::InvalidHyperparameter), see [`LossScalerConfig::validate`].
    pub fn new(config: LossScalerConfig) -> Result<Self> {
        config.validate()?;
        Ok(Self::with_valid(config))
    }

    fn with_valid(config: LossScalerConfig) -> Self {
        let state = LossScalerState {
            loss_scale: config.initial_loss_scale,
            clean_steps: 0,
            skipped_steps: 0,
            skipped_in_a_row: 0,
        };
        Self {
            config,
            state,
            judged: JudgedSets::default(),
        }
    }

    /// The configuration.
    pub fn config(&self) -> &LossScalerConfig {
        &self.config
    }

    /// What the next loss is multiplied by.
    pub fn loss_scale(&self) -> f64 {
        self.state.loss_scale
    }

    /// Steps without a non-finite gradient since the loss scale last changed.
    pub fn clean_steps(&self) -> u64 {
        self.state.clean_steps
    }

    /// Steps skipped so far.
    pub fn skipped_steps(&self) -> u64 {
        self.state.skipped_steps
    }

    /// The loss times the loss scale, differentiable. A bf16 or f16 loss is converted to f32 first, so that the product is finite. Its
    /// gradient still has the dtype of the loss and overflows f16 from 2^16 on: compute the loss in f32.
    ///
    /// # Errors
    /// candle's.
    pub fn scaled(&self, loss: &Tensor) -> Result<Tensor> {
        let loss = match loss.dtype() {
            DType::BF16 | DType::F16 => &loss.to_dtype(DType::F32)?,
            _ => loss,
        };
        Ok(loss.affine(self.state.loss_scale, 0.)?)
    }

    /// Divides the gradients of `vars` by the loss scale, and checks each element in the same pass. Returns how many gradients have an
    /// infinite or NaN element, at least 1 if a cast of the step has seen Inf or NaN in a model with one of `vars`: skip the step unless it
    /// is 0. Call this once per step, also with gradients summed over micro-batches. A variable that is given twice (tied weights) is divided
    /// once. The loss scale stays the same: [`DynamicLossScaler::update`] changes it.
    ///
    /// The factor is a power of two, so this rounds nothing in f32, f64 and bf16 above their subnormals. In f16, which has fewer exponents,
    /// small gradients would underflow here. So f16 gradients become f32, which this library's optimizers take;
    /// [`LossScalerConfig::f32_gradients`] turns that off for optimizers that take gradients in the variable's dtype only, such as
    /// candle-nn's.
    ///
    /// # Errors
    /// candle's, if memory for the gradients cannot be allocated or a device fails; some gradients may have been replaced by then.
    pub fn unscale<'a>(
        &self,
        grads: &mut GradStore,
        vars: impl IntoIterator<Item = &'a Var>,
    ) -> Result<usize> {
        Ok(self.unscale_with_veto(grads, vars)?.0)
    }

    /// [`DynamicLossScaler::unscale`], and what casts have seen.
    pub(super) fn unscale_with_veto<'a>(
        &self,
        grads: &mut GradStore,
        vars: impl IntoIterator<Item = &'a Var>,
    ) -> Result<(usize, CastVeto)> {
        let mut unscaled = Unscaled::new(1. / self.state.loss_scale, self.config.f32_gradients);
        let mut known = HashSet::new();
        let (mut first, mut versions) = (None, vec![]);
        for var in vars.into_iter().filter(|var| known.insert(var.id())) {
            first.get_or_insert(var.id());
            versions.push(WeightVersion::of(var));
            if let Some(grad) = grads.remove(var) {
                let grad = unscaled.take(&grad)?;
                grads.insert(var, grad);
            }
        }
        let veto = self.judged.veto(first, versions.iter())?;
        let non_finite = unscaled.non_finite(veto.marks()?)?;
        if non_finite > 0 {
            versions.iter().for_each(WeightVersion::note_step);
        }
        Ok((non_finite, veto))
    }

    /// Fails after too many steps skipped in a row.
    pub(super) fn check_skips(&self, veto: &CastVeto) -> Result<()> {
        let limit = self.config.max_skipped_steps;
        check_skips(self.state.skipped_in_a_row, limit, veto, std::iter::empty())
    }

    /// Adjusts the loss scale after a step: lowers it if a gradient was not finite, raises it after enough clean steps.
    pub fn update(&mut self, found_non_finite: bool) {
        let LossScalerConfig {
            growth_factor,
            growth_interval,
            backoff_factor,
            max_loss_scale,
            ..
        } = self.config;
        let state = &mut self.state;
        if found_non_finite {
            let floor = self.config.lowest();
            state.loss_scale = (state.loss_scale * backoff_factor).max(floor);
            state.clean_steps = 0;
            state.skipped_steps = state.skipped_steps.saturating_add(1);
            state.skipped_in_a_row = state.skipped_in_a_row.saturating_add(1);
            return;
        }
        state.skipped_in_a_row = 0;
        state.clean_steps = state.clean_steps.saturating_add(1);
        if state.clean_steps >= growth_interval {
            state.loss_scale = (state.loss_scale * growth_factor).min(max_loss_scale);
            state.clean_steps = 0;
        }
    }

    /// The state, for a checkpoint.
    pub fn state(&self) -> LossScalerState {
        self.state
    }

    /// Restores a state.
    ///
    /// # Errors
    /// [`OptimError::InvalidHyperparameter`](super::OptimError::InvalidHyperparameter) unless the loss scale is a power of two between the floor
    /// and the cap of this scaler's configuration; nothing changes then.
    pub fn load_state(&mut self, state: &LossScalerState) -> Result<()> {
        self.check_state(state)?;
        self.state = *state;
        Ok(())
    }

    pub(super) fn check_state(&self, state: &LossScalerState) -> Result<()> {
        let (low, high) = (self.config.lowest(), self.config.max_loss_scale);
        check_loss_scale("loss_scale", state.loss_scale, low, high)
    }
}
