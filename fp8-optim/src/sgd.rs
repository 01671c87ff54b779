//! Stochastic gradient descent: hyperparameters, momentum, formula.

use fp8_core::setters;
use serde::{Deserialize, Serialize};

use super::engine::Engine;
use super::error::Result;
use super::masters::MasterDType;
use super::moments::MomentStorage;
use super::plain::Variable;
use super::real::Real;
use super::rule::{MAX_MOMENTS, Moment, Rates, Rule};
use super::scaled::parameter::ScaledParameter;
use super::scaled::rule::{Extents, ScaledPlan, ScaledRule};
use super::scaled::size::{Window, factor, value};
use super::settings::{DecayScope, Settings, check};

/// Stochastic gradient descent over named variables, with momentum, dampening, Nesterov's momentum and weight decay as in
/// [`torch.optim.SGD`](https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html), and a state that can be saved.
///
/// Per variable, with g the clipped gradient: `g += decay theta`; with momentum `b = momentum b + (1 - dampening) g`, or `b = g` for
/// the first gradient, and `g = b`, or with Nesterov `g += momentum b`; last `theta -= lr g`. Without momentum and decay it gives
/// the bits of candle-nn's SGD for f32 and f64 variables, except the sign of a zero weight. A variable has no momentum buffer before its
/// first gradient. See [`Engine`] for what all optimizers have in common.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use fp8_optim::{Sgd, SgdConfig};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let w = Var::ones(3, DType::F32, &Device::Cpu)?;
/// let config = SgdConfig::default().with_lr(0.125).with_momentum(0.5);
/// let mut optimizer = Sgd::from_named(vec![("w".into(), w.clone())], config)?;
/// for _ in 0..2 {
///     // The gradient is 2 each time: the buffer is 2, then 3.
///     let report = optimizer.apply(&(&*w * 2.)?.sum_all()?.backward()?)?;
///     assert!(!report.skipped()?);
/// }
/// assert_eq!(w.to_vec1::<f32>()?, [0.375; 3]);
/// # Ok(()) }
/// ```
pub type Sgd = Engine<SgdConfig, Variable>;

/// [`Sgd`] of scaled parameters: momentum, dampening, Nesterov's momentum and weight decay as there, with the momentum buffer in the
/// dtype of its parameter and a scale of its own. See [the module](super::scaled).
pub type ScaledSgd = Engine<SgdConfig, ScaledParameter>;

/// The hyperparameters of [`Sgd`]. The defaults are torch's: no momentum, no decay, and no clipping.
///
/// ```
/// use fp8_optim::SgdConfig;
/// let config = SgdConfig::default().with_lr(0.1).with_momentum(0.9).with_nesterov(true);
/// assert!(config.validate().is_ok());
/// let error = config.with_dampening(0.5).validate().unwrap_err().to_string();
/// assert!(error.starts_with("dampening = 0.5 is not allowed"), "{error}");
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct SgdConfig {
    /// Learning rate of the next step; [`Engine::set_lr`] changes it. Default 1e-3.
    pub lr: f64,
    /// What the momentum buffer is multiplied by before the gradient is added, in [0, 1). 0, the default, for no momentum.
    pub momentum: f64,
    /// The gradient is added to the buffer times `1 - dampening`, except for the first one. In [0, 1]. Default 0.
    pub dampening: f64,
    /// Nesterov's momentum, which needs a momentum above 0 and no dampening. Default: false.
    pub nesterov: bool,
    /// This times the variable is added to the gradient after clipping. Default 0.
    pub weight_decay: f64,
    /// Which variables decay. Default: all.
    pub decay_scope: DecayScope,
    /// As [`AdamWConfig::max_grad_norm`](super::AdamWConfig::max_grad_norm). Default: no clipping.
    pub max_grad_norm: Option<f64>,
    /// The dtype of master weights. Default: no master weights.
    pub masters: Option<MasterDType>,
    /// How the momentum buffer is stored between steps. Default: in f32. Optimizers of scaled parameters take no other.
    pub moments: MomentStorage,
    /// Seed of stochastic rounding, which 16-bit masters and FP8 moments use. Default 0.
    pub seed: u64,
    /// As [`AdamWConfig::max_skipped_steps`](super::AdamWConfig::max_skipped_steps). Default 100.
    pub max_skipped_steps: Option<u64>,
}

impl Default for SgdConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            momentum: 0.,
            dampening: 0.,
            nesterov: false,
            weight_decay: 0.,
            decay_scope: DecayScope::All,
            max_grad_norm: None,
            masters: None,
            moments: MomentStorage::F32,
            seed: 0,
            max_skipped_steps: Some(100),
        }
    }
}

setters! { SgdConfig:
    with_lr(lr: f64);
    with_momentum(momentum: f64);
    with_dampening(dampening: f64);
    with_nesterov(nesterov: bool);
    with_weight_decay(weight_decay: f64);
    with_decay_scope(decay_scope: DecayScope);
    with_max_grad_norm(max_grad_norm: f64);
    with_masters(masters: MasterDType);
    with_moments(moments: MomentStorage);
    with_seed(seed: u64);
    with_max_skipped_steps(max_skipped_steps: impl Into<Option<u64>>);
}

impl SgdConfig {
    /// Checks that every value is finite and in range.
    ///
    /// # Errors
    /// [`InvalidHyperparameter`](super::OptimError::InvalidHyperparameter) with the name and value of the first field at fault.
    pub fn validate(&self) -> Result<()> {
        let (momentum, dampening) = (self.momentum, self.dampening);
        check(
            "momentum",
            momentum,
            (0.0..1.0).contains(&momentum) && !(self.nesterov && momentum == 0.),
            "it must be at least 0 and below 1, and above 0 with nesterov",
        )?;
        check(
            "dampening",
            dampening,
            (0.0..=1.0).contains(&dampening) && !(self.nesterov && dampening != 0.),
            "it must be between 0 and 1, and 0 with nesterov",
        )?;
        self.settings().validate()
    }

    /// What a gradient is multiplied by when it is added to the buffer.
    fn share(&self, at: &Rates) -> f64 {
        if at.begins { 1. } else { 1. - self.dampening }
    }
}

impl Rule for SgdConfig {
    const KIND: &'static str = "fp8.Sgd";
    const MOMENTS: &'static [Moment] = &[Moment::signed("momentum_buffer")];
    const MOMENT_COUNT: Option<&'static str> = Some("momentum_buffers");

    fn settings(&self) -> Settings {
        Settings {
            lr: self.lr,
            weight_decay: self.weight_decay,
            decay_scope: self.decay_scope,
            max_grad_norm: self.max_grad_norm,
            masters: self.masters,
            moments: self.moments,
            seed: self.seed,
            max_skipped_steps: self.max_skipped_steps,
        }
    }

    fn validate(&self) -> Result<()> {
        SgdConfig::validate(self)
    }

    fn set_lr(&mut self, lr: f64) {
        self.lr = lr;
    }

    fn keep_storage(&mut self, own: &Self) {
        (self.masters, self.moments) = (own.masters, own.moments);
    }

    fn has_moments(&self) -> bool {
        self.momentum != 0.
    }

    fn formula<V: Real>(&self, at: &Rates) -> impl Fn(V, V, &mut [V]) -> V + Copy + Sync {
        let (decays, nesterov) = (at.weight_decay != 0., self.nesterov);
        let has_momentum = self.has_moments();
        let [lr, decay] = [at.lr, at.weight_decay].map(V::number);
        let [momentum, share] = [self.momentum, self.share(at)].map(V::number);
        #[inline(always)]
        move |theta: V, g: V, moments: &mut [V]| {
            let g = if decays {
                g + theta.clone().times(decay)
            } else {
                g
            };
            if !has_momentum {
                return theta - g.times(lr);
            }
            let buffer = moments[0].clone().times(momentum) + g.clone().times(share);
            moments[0] = buffer.clone();
            let change = if nesterov {
                g + buffer.times(momentum)
            } else {
                buffer
            };
            theta - change.times(lr)
        }
    }
}

impl ScaledRule for SgdConfig {
    const SCALED_KIND: &'static str = "fp8.ScaledSgd";
    const SCALED_MOMENTS: &'static [Moment] = Self::MOMENTS;

    /// In the unit of the new buffer; without momentum in a unit in which the gradient has the size of a buffer.
    fn scaled_plan(
        &self,
        at: &Rates,
        extents: Extents,
    ) -> ScaledPlan<impl Fn(f32, f32, &mut [f32]) -> f32 + Copy + Sync> {
        let (momentum, nesterov, share) = (self.momentum, self.nesterov, self.share(at));
        let (p, buffer, grad) = (extents.parameter, extents.moments[0], extents.grad);
        let size = p.size();
        let g_size = at.clip * grad.amax * grad.unit() + at.weight_decay * size;
        // Bounds of the new buffer, and of what the parameter changes by.
        let bound = momentum * buffer.size() + share * g_size;
        let unit = if momentum > 0. { bound } else { g_size };
        let unit = Window::MOMENT.scale(buffer.dequant_scale, unit);
        let change = match (momentum > 0., nesterov) {
            (false, _) => g_size,
            (true, false) => bound,
            (true, true) => g_size + momentum * bound,
        };
        let next = Window::PARAMETER.scale(p.dequant_scale, size + at.lr * change);
        let (unit_value, next_value) = (value(unit), value(next));
        let of_grad = factor(at.clip * grad.unit() / unit_value);
        let of_decay = factor(at.weight_decay * p.unit() / unit_value);
        let of_buffer = factor(momentum * buffer.unit() / unit_value);
        let of_parameter = factor(p.unit() / next_value);
        let of_change = factor(at.lr * unit_value / next_value);
        let (has_momentum, share, momentum) = (self.has_moments(), share as f32, momentum as f32);
        ScaledPlan::new(
            next,
            [unit; MAX_MOMENTS],
            #[inline(always)]
            move |p: f32, g: f32, moments: &mut [f32]| {
                // Data with the scale zero may hold anything.
                let g = if of_grad == 0. { 0. } else { g * of_grad };
                let g = if of_decay == 0. { g } else { g + p * of_decay };
                let change = if !has_momentum {
                    g
                } else {
                    let buffer = moments[0] * of_buffer + g * share;
                    moments[0] = buffer;
                    if nesterov {
                        g + buffer * momentum
                    } else {
                        buffer
                    }
                };
                p * of_parameter - change * of_change
            },
        )
    }
}
