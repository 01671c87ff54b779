//! AdamW.

use super::super::counter::correction;
use super::super::error::Result;
use super::super::params::check_lr;
use super::super::{AdamWConfig, OptimError, ParamGroup, StepReport};
use super::core::{Core, Rates};
use super::grad::Grad;
use super::kernel::pass;
use super::size::{Window, factor, value};
use super::slot::{Moment, Slot};
use super::{RoundTo, ScaledCounts, ScaledOptimizer};
use crate::scaled::ScaledVarMap;
use candle_core::Tensor;
use fp8_scaled::{ScaledGrads, ScaledVar};

/// [`AdamW`](super::super::AdamW) of scaled parameters, with moments in the dtype of their parameter and scales of their own. See
/// [the module](super).
///
/// Per variable and step `t` counted from 1, with g the clipped gradient: `m = beta1 m + (1 - beta1) g`,
/// `u = sqrt(beta2 u^2 + (1 - beta2) g^2)`,
/// `theta = (1 - lr decay) theta - lr (m / (1 - beta1^t)) / (u / sqrt(1 - beta2^t) + eps)`.
///
/// The second moment is kept as its root `u`: squares would have twice the range of f16. The quotient is held to what it can be without
/// rounding (it follows from the betas and `t`), since `u` may round to 0 where `m` does not.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Tensor};
/// use fp8_scaled::ScaledVar;
/// use fp8::optim::AdamWConfig;
/// use fp8::optim::scaled::{ScaledAdamW, ScaledOptimizer};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let w = ScaledVar::new("w", &Tensor::ones(4, DType::F16, &Device::Cpu)?)?;
/// let config = AdamWConfig { lr: 0.25, weight_decay: 0., ..Default::default() };
/// let mut adam = ScaledAdamW::from_vars(vec![w.clone()], config)?;
/// let report = adam.apply(&w.value().mul(&w.value())?.sum_all()?.backward()?)?;
/// assert_eq!(report.updated, 1);
/// // The first step goes by the learning rate, whatever the size of the gradient.
/// assert!(w.value().to_vec1()?.iter().all(|w| (w - 0.75).abs() < 1e-3));
/// # Ok(()) }
/// ```
pub struct ScaledAdamW {
    pub(super) core: Core<2>,
    pub(super) config: AdamWConfig,
}

impl ScaledAdamW {
    /// An optimizer of all parameters of the map.
    ///
    /// # Errors
    /// As [`ScaledAdamW::from_vars`].
    pub fn new(params: &ScaledVarMap, config: AdamWConfig) -> Result<Self> {
        Self::from_vars(params.vars(), config)
    }

    /// An optimizer of these parameters, ordered by name; clones of one parameter are one.
    ///
    /// # Errors
    /// [`OptimError::InvalidHyperparameter`], [`OptimError::DuplicateName`], [`OptimError::ScaledMasters`] if the configuration asks for
    /// master weights, [`OptimError::ScaledDtype`] for f64, [`OptimError::ScaledDevice`].
    pub fn from_vars(vars: Vec<ScaledVar>, config: AdamWConfig) -> Result<Self> {
        config.validate()?;
        if let Some(masters) = config.masters() {
            return Err(OptimError::ScaledMasters {
                dtype: masters.dtype(),
            });
        }
        let mut core = Core::new(vars, |rank| config.decay_scope.includes(rank))?;
        core.round = RoundTo::Stochastic { seed: config.seed };
        for slot in &mut core.slots {
            slot.moments = Some([Moment::zeros(&slot.var), Moment::zeros(&slot.var)]);
        }
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
    pub fn config(&self) -> &AdamWConfig {
        &self.config
    }

    /// The parameters, in the order of the updates.
    pub fn vars(&self) -> impl Iterator<Item = &ScaledVar> {
        self.core.slots.iter().map(|slot| &slot.var)
    }
}

impl ScaledOptimizer for ScaledAdamW {
    fn apply(&mut self, grads: &ScaledGrads) -> Result<StepReport> {
        let config = &self.config;
        let (lr, decay) = (config.lr, config.weight_decay);
        let limits = (config.max_grad_norm, config.max_skipped_steps);
        (self.core).apply(grads, lr, decay, limits, |slot, grad, rates| {
            update(slot, grad, rates, config)
        })
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

impl std::fmt::Debug for ScaledAdamW {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ScaledAdamW")
            .field("vars", &self.core.slots.len())
            .field("step", &self.core.step)
            .field("config", &self.config)
            .finish()
    }
}

/// The largest quotient `(m c1) / (u sqrt(c2))` that gradients can give: by the inequality of Cauchy and Schwarz, since both are sums over
/// the same gradients with known weights.
fn largest_quotient(beta1: f64, beta2: f64, step: u64, c1: f64, root_c2: f64) -> f64 {
    // Where beta2 is 0, u is the last gradient, and m / u has no bound.
    let ratio = beta1 * beta1 / beta2;
    let terms = match ratio {
        1.0 => step as f64,
        ratio if ratio.is_nan() => 1.0,
        ratio => (1.0 - ratio.powf(step as f64)) / (1.0 - ratio),
    };
    let bound = ((1.0 - beta1).powi(2) / (1.0 - beta2) * terms).sqrt() * c1 / root_c2;
    // Beyond that no learning rate makes sense of it.
    if bound < 1e4 { bound } else { 1e4 }
}

/// The update of one variable, in the units of the scales.
fn update(
    slot: &mut Slot<2>,
    grad: &Grad,
    rates: &Rates,
    config: &AdamWConfig,
) -> candle_core::Result<u64> {
    let &AdamWConfig {
        beta1, beta2, eps, ..
    } = config;
    let (c1, c2) = (correction(beta1, rates.step), correction(beta2, rates.step));
    let limit = largest_quotient(beta1, beta2, rates.step, c1, 1.0 / c2.sqrt());
    let decay = 1.0 - rates.lr * rates.weight_decay;
    let (p_scale, p_amax) = (slot.var.scale(), f64::from(slot.amax()?));
    let g_unit = rates.clip * grad.scale;
    let g_size = g_unit * grad.amax;
    let var = slot.var.data_var().clone();
    let fresh = || [Moment::zeros(&slot.var), Moment::zeros(&slot.var)];
    let mut moments = slot.moments.take().unwrap_or_else(fresh);
    let [m, u] = &mut moments;
    let m_scale = Window::MOMENT.scale(Some(m.scale), beta1 * m.size() + (1.0 - beta1) * g_size);
    let u_bound = (beta2 * u.size().powi(2) + (1.0 - beta2) * g_size.powi(2)).sqrt();
    let u_scale = Window::MOMENT.scale(Some(u.scale), u_bound);
    // Where no gradient has been, nothing but decay changes, and data keep their scale.
    let moves = m.size() > 0.0 || g_size > 0.0;
    let change = if moves { rates.lr * limit } else { 0.0 };
    let size = decay.abs() * p_amax * value(p_scale) + change;
    let next = Window::PARAMETER.scale(Some(p_scale), size);

    let of = |x: f64, scale| factor(x / value(scale));
    let m_kept = of(beta1 * value(m.scale), m_scale);
    let m_taken = of((1.0 - beta1) * g_unit, m_scale);
    let u_kept = of(beta2.sqrt() * value(u.scale), u_scale);
    let u_taken = of((1.0 - beta2).sqrt() * g_unit, u_scale);
    let u_value = value(u_scale) * c2.sqrt();
    let quotient = factor(value(m_scale) * c1 / u_value);
    let eps = factor(eps / u_value);
    let p_kept =
        (decay * value(p_scale) / value(next)).clamp(-f64::from(f32::MAX), f32::MAX.into());
    let (p_kept, lr) = (p_kept as f32, of(rates.lr, next));
    let limit = limit as f32;
    let is_zero = g_unit == 0.0;
    let passed = pass(
        &var,
        [&mut m.values, &mut u.values],
        grad,
        rates.rounded,
        #[inline(always)]
        |p: &mut [f32], [m, u]: [&mut [f32]; 2], g: &[f32]| {
            for (((p, m), u), g) in p.iter_mut().zip(m).zip(u).zip(g) {
                // A tensor of zero scale may hold anything.
                let g = if is_zero { 0. } else { *g };
                *m = *m * m_kept + g * m_taken;
                let (old, new) = (*u * u_kept, g * u_taken);
                *u = (old * old + new * new).sqrt();
                let change = if *m == 0. {
                    0.
                } else {
                    (*m * quotient / (*u + eps)).clamp(-limit, limit)
                };
                *p = *p * p_kept - change * lr;
            }
        },
    );
    if let Ok(passed) = &passed {
        (m.scale, u.scale) = (m_scale, u_scale);
        [m.amax, u.amax] = passed.moments;
    }
    slot.moments = Some(moments);
    let passed = passed?;
    slot.changed(next, passed.parameter);
    Ok(passed.saturated)
}
