//! Stochastic gradient descent.

use super::super::error::Result;
use super::super::params::check_lr;
use super::super::{OptimError, ParamGroup, SgdConfig, StepReport};
use super::core::{Core, Rates};
use super::grad::Grad;
use super::kernel::pass;
use super::size::{Window, factor, value};
use super::slot::{Moment, Slot};
use super::{RoundTo, ScaledCounts, ScaledOptimizer};
use crate::scaled::ScaledVarMap;
use candle_core::Tensor;
use fp8_scaled::{ScaledGrads, ScaledVar};

/// [`Sgd`](super::super::Sgd) of scaled parameters: momentum, dampening, Nesterov's momentum and weight decay as there, with the momentum
/// buffer in the dtype of its parameter and a scale of its own. See [the module](super).
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Tensor};
/// use fp8_scaled::ScaledVar;
/// use fp8::optim::SgdConfig;
/// use fp8::optim::scaled::{ScaledOptimizer, ScaledSgd};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let w = ScaledVar::new("w", &Tensor::ones(4, DType::F16, &Device::Cpu)?)?;
/// let config = SgdConfig::default().with_lr(0.125).with_momentum(0.5);
/// let mut sgd = ScaledSgd::from_vars(vec![w.clone()], config)?;
/// for _ in 0..2 {
///     // The gradient is 1 each time: the buffer is 1, then 1.5.
///     let report = sgd.apply(&w.value().sum_all()?.backward()?)?;
///     assert_eq!(report.grad_norm()?, 2.0);
/// }
/// assert_eq!(w.value().to_vec1()?, [0.6875; 4]);
/// # Ok(()) }
/// ```
pub struct ScaledSgd {
    pub(super) core: Core<1>,
    pub(super) config: SgdConfig,
}

impl ScaledSgd {
    /// An optimizer of all parameters of the map.
    ///
    /// # Errors
    /// As [`ScaledSgd::from_vars`].
    pub fn new(params: &ScaledVarMap, config: SgdConfig) -> Result<Self> {
        Self::from_vars(params.vars(), config)
    }

    /// An optimizer of these parameters, ordered by name; clones of one parameter are one.
    ///
    /// # Errors
    /// [`OptimError::InvalidHyperparameter`], [`OptimError::DuplicateName`], [`OptimError::ScaledMasters`] if the configuration asks for
    /// master weights, [`OptimError::ScaledDtype`] for f64, [`OptimError::ScaledDevice`].
    pub fn from_vars(vars: Vec<ScaledVar>, config: SgdConfig) -> Result<Self> {
        config.validate()?;
        if let Some(masters) = config.masters {
            return Err(OptimError::ScaledMasters {
                dtype: masters.dtype(),
            });
        }
        let mut core = Core::new(vars, |rank| config.decay_scope.includes(rank))?;
        core.round = RoundTo::Stochastic { seed: config.seed };
        Ok(Self { core, config })
    }

    /// With another rounding than [`RoundTo::Stochastic`] with the seed of the configuration.
    pub fn with_rounding(mut self, round: RoundTo) -> Self {
        self.core.round = round;
        self
    }

    /// Gives parameters hyperparameters of their own; replaces the groups that there were.
    ///
    /// # Errors
    /// [`OptimError::NoSuchVariable`] for a pattern that names none, and [`OptimError::InvalidHyperparameter`].
    pub fn with_groups(mut self, groups: Vec<ParamGroup>) -> Result<Self> {
        self.core = self.core.with_groups(groups)?;
        Ok(self)
    }

    /// Leaves the parameters that `no_decay(name, data)` picks out of weight decay; all others decay, but where their group says
    /// otherwise.
    pub fn with_no_decay(mut self, no_decay: impl Fn(&str, &Tensor) -> bool) -> Self {
        self.core = self.core.with_no_decay(no_decay);
        self
    }

    /// The hyperparameters, with the learning rate of the next step.
    pub fn config(&self) -> &SgdConfig {
        &self.config
    }

    /// The parameters, in the order of the updates.
    pub fn vars(&self) -> impl Iterator<Item = &ScaledVar> {
        self.core.slots.iter().map(|slot| &slot.var)
    }
}

impl ScaledOptimizer for ScaledSgd {
    fn apply(&mut self, grads: &ScaledGrads) -> Result<StepReport> {
        let SgdConfig {
            lr,
            momentum,
            dampening,
            nesterov,
            weight_decay,
            max_grad_norm,
            max_skipped_steps,
            ..
        } = self.config;
        let numbers = Momentum {
            momentum,
            dampening,
            nesterov,
        };
        (self.core).apply(
            grads,
            lr,
            weight_decay,
            (max_grad_norm, max_skipped_steps),
            |slot, grad, rates| update(slot, grad, rates, numbers),
        )
    }

    fn lr(&self) -> f64 {
        self.config.lr
    }

    fn set_lr(&mut self, lr: f64) -> Result<()> {
        check_lr(lr)?;
        self.config.lr = lr;
        Ok(())
    }

    fn steps(&self) -> u64 {
        self.core.step
    }

    fn counts(&self) -> ScaledCounts {
        self.core.counts
    }
}

impl std::fmt::Debug for ScaledSgd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ScaledSgd")
            .field("vars", &self.core.slots.len())
            .field("step", &self.core.step)
            .field("config", &self.config)
            .finish()
    }
}

#[derive(Clone, Copy)]
struct Momentum {
    momentum: f64,
    dampening: f64,
    nesterov: bool,
}

/// The update of one variable. `g += decay p`, `b = momentum b + share g`, `p -= lr (b or g + momentum b)`, in the unit of the new
/// buffer (without momentum: a unit in which the gradient has the size of a buffer).
fn update(
    slot: &mut Slot<1>,
    grad: &Grad,
    rates: &Rates,
    numbers: Momentum,
) -> candle_core::Result<u64> {
    let Momentum {
        momentum,
        dampening,
        nesterov,
    } = numbers;
    let (p_scale, p_amax) = (slot.var.scale(), f64::from(slot.amax()?));
    let size = p_amax * value(p_scale);
    let g_size = rates.clip * grad.amax * grad.scale + rates.weight_decay * size;
    let begins = slot.moments.is_none();
    let share = if begins { 1. } else { 1. - dampening };
    let (b_size, b_scale) = match &slot.moments {
        Some([moment]) => (moment.size(), Some(moment.scale)),
        None => (0., None),
    };
    // Bounds of the new buffer, and of what the parameter changes by.
    let bound = momentum * b_size + share * g_size;
    let unit = Window::MOMENT.scale(b_scale, if momentum > 0. { bound } else { g_size });
    let change = match (momentum > 0., nesterov) {
        (false, _) => g_size,
        (true, false) => bound,
        (true, true) => g_size + momentum * bound,
    };
    let next = Window::PARAMETER.scale(Some(p_scale), size + rates.lr * change);
    let (unit_value, next_value) = (value(unit), value(next));
    let of_grad = factor(rates.clip * grad.scale / unit_value);
    let of_decay = factor(rates.weight_decay * value(p_scale) / unit_value);
    let of_buffer = factor(momentum * b_scale.map_or(0., value) / unit_value);
    let of_parameter = factor(value(p_scale) / next_value);
    let of_change = factor(rates.lr * unit_value / next_value);
    let (share, momentum_f32) = (share as f32, momentum as f32);
    let gradient = move |p: f32, g: f32| {
        // A tensor of zero scale may hold anything.
        let g = if of_grad == 0. { 0. } else { g * of_grad };
        if of_decay == 0. { g } else { g + p * of_decay }
    };
    let var = slot.var.data_var().clone();
    if momentum == 0. {
        let passed = pass(
            &var,
            [],
            grad,
            rates.rounded,
            |p: &mut [f32], []: [&mut [f32]; 0], g: &[f32]| {
                for (p, g) in p.iter_mut().zip(g) {
                    *p = *p * of_parameter - gradient(*p, *g) * of_change;
                }
            },
        )?;
        slot.changed(next, passed.parameter);
        return Ok(passed.saturated);
    }
    let fresh = || [Moment::zeros(&slot.var)];
    let mut moments = slot.moments.take().unwrap_or_else(fresh);
    let [moment] = &mut moments;
    let passed = pass(
        &var,
        [&mut moment.values],
        grad,
        rates.rounded,
        #[inline(always)]
        |p: &mut [f32], [b]: [&mut [f32]; 1], g: &[f32]| {
            for ((p, b), g) in p.iter_mut().zip(b).zip(g) {
                let g = gradient(*p, *g);
                *b = *b * of_buffer + g * share;
                let change = if nesterov { g + *b * momentum_f32 } else { *b };
                *p = *p * of_parameter - change * of_change;
            }
        },
    );
    if let Ok(passed) = &passed {
        moment.scale = unit;
        [moment.amax] = passed.moments;
    }
    // A buffer that no pass has written is none.
    if passed.is_ok() || !begins {
        slot.moments = Some(moments);
    }
    let passed = passed?;
    slot.changed(next, passed.parameter);
    Ok(passed.saturated)
}
