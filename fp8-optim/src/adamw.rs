//! AdamW: hyperparameters, moments, formula.

use serde::{Deserialize, Serialize};

use super::counter::correction;
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
use super::settings::{DecayScope, Settings, check, check_not_negative};
use fp8_scaled::Scale;

/// AdamW (decoupled weight decay) over named variables, with a state that can be saved.
///
/// Per variable and step `t` counted from 1, with g the clipped gradient:
/// `m = beta1 m + (1 - beta1) g`, `v = beta2 v + (1 - beta2) g^2`,
/// `theta = (1 - lr decay) theta - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)`,
/// in the order of operations of candle-nn's AdamW: for f32 and f64 variables on the CPU both give the same bits when nothing is clipped,
/// except the sign of a zero weight. See [`Engine`] for what all optimizers have in common.
///
/// When all variables are on one CUDA device, kernels take the step, and it never waits for the device: see
/// [`StepReport`](super::StepReport). Variables that are in groups, have masters in bf16 or f16, or have gradients of another dtype are
/// updated by candle's operations there, and then the host reads the norm.
///
/// ```
/// # use candle_core::{DType, Device, Var};
/// # use fp8_optim::{AdamW, AdamWConfig};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let w = Var::ones(3, DType::F32, &Device::Cpu)?;
/// let config = AdamWConfig { lr: 0.25, weight_decay: 0., ..Default::default() };
/// let mut optimizer = AdamW::from_named(vec![("w".into(), w.clone())], config)?;
/// let report = optimizer.apply(&w.sqr()?.sum_all()?.backward()?)?;
/// assert!(!report.skipped()?);
/// // The first step goes by the learning rate, whatever the size of the gradient.
/// assert!(w.to_vec1::<f32>()?.iter().all(|w| (w - 0.75).abs() < 1e-6));
/// # Ok(()) }
/// ```
pub type AdamW = Engine<AdamWConfig, Variable>;

/// [`AdamW`] of scaled parameters, with moments in the dtype of their parameter and scales of their own. See
/// [the module](super::scaled).
///
/// Per variable and step `t` counted from 1, with g the clipped gradient: `m = beta1 m + (1 - beta1) g`,
/// `u = sqrt(beta2 u^2 + (1 - beta2) g^2)`,
/// `theta = (1 - lr decay) theta - lr (m / (1 - beta1^t)) / (u / sqrt(1 - beta2^t) + eps)`.
///
/// The second moment is kept as its root `u`: squares would have twice the range of f16. The quotient is clamped to the largest value that
/// it can have without rounding (which follows from the betas and `t`), since `u` may round to 0 where `m` does not.
pub type ScaledAdamW = Engine<AdamWConfig, ScaledParameter>;

/// The hyperparameters of [`AdamW`]. The defaults are candle-nn's, without clipping.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWConfig {
    /// Learning rate of the next step; [`Engine::set_lr`] changes it. Default 1e-3.
    pub lr: f64,
    /// Decay of the running mean of gradients, in [0, 1). Default 0.9.
    pub beta1: f64,
    /// Decay of the running mean of squared gradients, in [0, 1). Default 0.999.
    pub beta2: f64,
    /// Added to the root of the second moment. Default 1e-8.
    pub eps: f64,
    /// Decoupled weight decay: a variable is multiplied by `1 - lr * weight_decay`. Default 0.01.
    pub weight_decay: f64,
    /// Which variables decay. Default: all.
    pub decay_scope: DecayScope,
    /// Gradients are multiplied by `min(1, max_grad_norm / (norm + 1e-6))`, where `norm` is the Euclidean norm over all gradients of
    /// all variables (the formula of `torch.nn.utils.clip_grad_norm_`). Default: no clipping. Where ranks hold parts of some variables, as in
    /// tensor parallel layers, call [`Engine::with_parts`]: otherwise each rank clips by the norm of what it holds.
    pub max_grad_norm: Option<f64>,
    /// Whether the optimizer keeps a master copy of every variable of another dtype than [`AdamWConfig::master_dtype`], which it
    /// updates and then rounds into the variable: updates below half a unit in the variable's last place add up instead of being lost.
    /// Where the variable no longer equals its rounded copy, because it was written to, the variable's own value is used.
    /// Default: false.
    pub master_weights: bool,
    /// The dtype of master copies, see [`MasterDType`]. Default: f32, for bf16 and f16 variables.
    pub master_dtype: MasterDType,
    /// How moments are stored between steps. Default: in f32. Optimizers of scaled parameters take no other.
    pub moments: MomentStorage,
    /// Seed of stochastic rounding, which 16-bit masters and FP8 moments use. Default 0.
    pub seed: u64,
    /// After this many consecutive steps were skipped because of Inf or NaN, a step fails and names where those came from
    /// ([`OptimError::TooManySkipped`](super::OptimError::TooManySkipped)); None: never. Where a CUDA device decides whether a step is
    /// skipped, only steps whose reports are read count. Default 100.
    pub max_skipped_steps: Option<u64>,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            decay_scope: DecayScope::All,
            max_grad_norm: None,
            master_weights: false,
            master_dtype: MasterDType::F32,
            moments: MomentStorage::F32,
            seed: 0,
            max_skipped_steps: Some(100),
        }
    }
}

impl AdamWConfig {
    /// Checks that every value is finite and in range.
    ///
    /// # Errors
    /// [`InvalidHyperparameter`](super::OptimError::InvalidHyperparameter) with the name and value of the first field at fault.
    pub fn validate(&self) -> Result<()> {
        for (name, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            let below_one = "it must be at least 0 and below 1";
            check(name, beta, (0.0..1.0).contains(&beta), below_one)?;
        }
        check_not_negative("eps", self.eps)?;
        self.settings().validate()
    }
}

impl Rule for AdamWConfig {
    const KIND: &'static str = "fp8.AdamW";
    const MOMENTS: &'static [Moment] = &[
        Moment::signed("exp_avg"),
        Moment::non_negative("exp_avg_sq"),
    ];

    fn settings(&self) -> Settings {
        Settings {
            lr: self.lr,
            weight_decay: self.weight_decay,
            decay_scope: self.decay_scope,
            max_grad_norm: self.max_grad_norm,
            masters: self.master_weights.then_some(self.master_dtype),
            moments: self.moments,
            seed: self.seed,
            max_skipped_steps: self.max_skipped_steps,
        }
    }

    fn validate(&self) -> Result<()> {
        AdamWConfig::validate(self)
    }

    fn set_lr(&mut self, lr: f64) {
        self.lr = lr;
    }

    fn keep_storage(&mut self, own: &Self) {
        (self.master_weights, self.master_dtype) = (own.master_weights, own.master_dtype);
        self.moments = own.moments;
    }

    /// The order of operations is that of candle-nn's AdamW; `kernels/adamw.cu` follows it too.
    fn formula<V: Real>(&self, at: &Rates) -> impl Fn(V, V, &mut [V]) -> V + Copy + Sync {
        let [beta1, rest1] = [self.beta1, 1.0 - self.beta1].map(V::number);
        let [beta2, rest2] = [self.beta2, 1.0 - self.beta2].map(V::number);
        let correction1 = V::number(correction(self.beta1, at.step));
        let correction2 = V::number(correction(self.beta2, at.step));
        let [lr, eps] = [at.lr, self.eps].map(V::number);
        let decay = V::number(1.0 - at.lr * at.weight_decay);
        #[inline(always)]
        move |theta: V, g: V, moments: &mut [V]| {
            let m = moments[0].clone().times(beta1) + g.clone().times(rest1);
            let v = moments[1].clone().times(beta2) + (g.clone() * g).times(rest2);
            moments[0] = m.clone();
            moments[1] = v.clone();
            let adjusted = m.times(correction1) / v.times(correction2).sqrt().plus(eps);
            theta.times(decay) - adjusted.times(lr)
        }
    }

    #[cfg(feature = "cuda")]
    fn adamw_kernel(&self) -> Option<fp8_candle::optim::AdamWHyperparameters> {
        Some(fp8_candle::optim::AdamWHyperparameters {
            lr: self.lr,
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps,
            decay: 1.0 - self.lr * self.weight_decay,
            max_grad_norm: self.max_grad_norm,
        })
    }
}

impl ScaledRule for AdamWConfig {
    const SCALED_KIND: &'static str = "fp8.ScaledAdamW";
    const SCALED_MOMENTS: &'static [Moment] = &[
        Moment::signed("exp_avg"),
        Moment::non_negative("exp_avg_root"),
    ];

    fn scaled_plan(
        &self,
        at: &Rates,
        extents: Extents,
    ) -> ScaledPlan<impl Fn(f32, f32, &mut [f32]) -> f32 + Copy + Sync> {
        let &Self {
            beta1, beta2, eps, ..
        } = self;
        let (c1, c2) = (correction(beta1, at.step), correction(beta2, at.step));
        let limit = largest_quotient(beta1, beta2, at.step, c1, 1.0 / c2.sqrt());
        let decay = 1.0 - at.lr * at.weight_decay;
        let [m, u, _] = extents.moments;
        let g_unit = at.clip * extents.grad.unit();
        let g_size = g_unit * extents.grad.amax;
        let m_scale =
            Window::MOMENT.scale(m.dequant_scale, beta1 * m.size() + (1.0 - beta1) * g_size);
        let u_bound = (beta2 * u.size().powi(2) + (1.0 - beta2) * g_size.powi(2)).sqrt();
        let u_scale = Window::MOMENT.scale(u.dequant_scale, u_bound);
        // Without any gradient so far only decay changes the data, and they keep their scale.
        let moves = m.size() > 0.0 || g_size > 0.0;
        let change = if moves { at.lr * limit } else { 0.0 };
        let p = extents.parameter;
        let size = decay.abs() * p.amax * p.unit() + change;
        let next = Window::PARAMETER.scale(p.dequant_scale, size);

        let of = |x: f64, scale| factor(x / value(scale));
        let m_kept = of(beta1 * m.unit(), m_scale);
        let m_taken = of((1.0 - beta1) * g_unit, m_scale);
        let u_kept = of(beta2.sqrt() * u.unit(), u_scale);
        let u_taken = of((1.0 - beta2).sqrt() * g_unit, u_scale);
        let u_value = value(u_scale) * c2.sqrt();
        let quotient = factor(value(m_scale) * c1 / u_value);
        let eps = factor(eps / u_value);
        let p_kept = decay * p.unit() / value(next);
        let p_kept = p_kept.clamp(-f64::from(f32::MAX), f32::MAX.into()) as f32;
        let (lr, limit) = (of(at.lr, next), limit as f32);
        let is_zero = g_unit == 0.0;
        let mut moments = [Scale::ZERO; MAX_MOMENTS];
        [moments[0], moments[1]] = [m_scale, u_scale];
        ScaledPlan::new(
            next,
            moments,
            #[inline(always)]
            move |p: f32, g: f32, moments: &mut [f32]| {
                // Data with the scale zero may hold anything.
                let g = if is_zero { 0. } else { g };
                let m = moments[0] * m_kept + g * m_taken;
                let (old, new) = (moments[1] * u_kept, g * u_taken);
                let u = (old * old + new * new).sqrt();
                moments[0] = m;
                moments[1] = u;
                let change = if m == 0. {
                    0.
                } else {
                    (m * quotient / (u + eps)).clamp(-limit, limit)
                };
                p * p_kept - change * lr
            },
        )
    }
}

/// The largest possible quotient `(m c1) / (u sqrt(c2))`, by the Cauchy-Schwarz inequality: both are sums over the same gradients with
/// known weights.
fn largest_quotient(beta1: f64, beta2: f64, step: u64, c1: f64, root_c2: f64) -> f64 {
    // Where beta2 is 0, u is the last gradient, and m / u has no bound.
    let ratio = beta1 * beta1 / beta2;
    let terms = match ratio {
        1.0 => step as f64,
        ratio if ratio.is_nan() => 1.0,
        ratio => (1.0 - ratio.powf(step as f64)) / (1.0 - ratio),
    };
    let bound = ((1.0 - beta1).powi(2) / (1.0 - beta2) * terms).sqrt() * c1 / root_c2;
    // A larger bound would never matter, whatever the learning rate.
    if bound < 1e4 { bound } else { 1e4 }
}
