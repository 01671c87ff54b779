//! What makes one optimizer differ from another: its hyperparameters, its moments, and its formula.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::Result;
use super::real::Real;
use super::settings::Settings;

/// The most moments that a rule can have: stochastic rounding numbers the tensors of a parameter from 0 to 3.
pub const MAX_MOMENTS: usize = 3;

/// A tensor that the optimizer keeps for each parameter, of the parameter's shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// Its name in a state, after the parameter's and a dot.
    pub name: &'static str,
    /// Whether a state with a negative value is refused.
    pub non_negative: bool,
}

impl Moment {
    /// A moment of any sign.
    pub const fn signed(name: &'static str) -> Self {
        Self {
            name,
            non_negative: false,
        }
    }

    /// A moment that is never negative.
    pub const fn non_negative(name: &'static str) -> Self {
        Self {
            name,
            non_negative: true,
        }
    }
}

/// The numbers of one step of one parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Learning rate, that of the parameter's group if it has one.
    pub lr: f64,
    /// Weight decay; 0 for a parameter that does not decay.
    pub weight_decay: f64,
    /// The factor of all gradients; exactly 1 when nothing is clipped. A formula gets gradients that are multiplied by it.
    pub clip: f64,
    /// The step, counted from 1.
    pub step: u64,
    /// The place of the parameter among the sorted names.
    pub index: usize,
    /// Whether the moments begin with this step: they are zeros.
    pub begins: bool,
}

/// An optimizer's hyperparameters and formula: all that [`Engine`](super::Engine) needs to make an optimizer with groups, master
/// weights, clipping, skipped steps and checkpoints.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use fp8_optim::{DecayScope, Engine, Moment, MomentStorage, OptimError, Rates, Real, Rule, Settings, Variable};
/// use serde::{Deserialize, Serialize};
///
/// /// `m = beta m + (1 - beta) g; theta -= lr m`
/// #[derive(Clone, Debug, Serialize, Deserialize)]
/// struct Smoothed { lr: f64, beta: f64 }
///
/// impl Rule for Smoothed {
///     const KIND: &'static str = "my_crate.Smoothed";
///     const MOMENTS: &'static [Moment] = &[Moment::signed("mean")];
///
///     fn settings(&self) -> Settings {
///         Settings {
///             lr: self.lr,
///             weight_decay: 0.,
///             decay_scope: DecayScope::All,
///             max_grad_norm: None,
///             masters: None,
///             moments: MomentStorage::F32,
///             seed: 0,
///             max_skipped_steps: Some(100),
///         }
///     }
///
///     fn validate(&self) -> Result<(), OptimError> {
///         Ok(())
///     }
///
///     fn set_lr(&mut self, lr: f64) {
///         self.lr = lr;
///     }
///
///     fn formula<V: Real>(&self, at: &Rates) -> impl Fn(V, V, &mut [V]) -> V + Copy + Sync {
///         let [beta, rest, lr] = [self.beta, 1. - self.beta, at.lr].map(V::number);
///         move |theta, grad, moments| {
///             let mean = moments[0].clone().times(beta) + grad.times(rest);
///             moments[0] = mean.clone();
///             theta - mean.times(lr)
///         }
///     }
/// }
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let w = Var::ones(3, DType::F32, &Device::Cpu)?;
/// let rule = Smoothed { lr: 0.5, beta: 0.5 };
/// let mut optimizer = Engine::<_, Variable>::from_named(vec![("w".into(), w.clone())], rule)?;
/// optimizer.apply(&w.sum_all()?.backward()?)?;
/// assert_eq!(w.to_vec1::<f32>()?, [0.75; 3]);
/// assert!(optimizer.state()?.contains_key("w.mean"));
/// # Ok(()) }
/// ```
pub trait Rule: Clone + std::fmt::Debug + Serialize + DeserializeOwned {
    /// The name of the optimizer in a state; put your crate's name before it.
    const KIND: &'static str;
    /// What is kept of each parameter; three at most.
    const MOMENTS: &'static [Moment];
    /// None: moments are zeros from the start, and a state has all of them. A name: the moments of a parameter begin with its first
    /// gradient, and a state counts the parameters that have moments under this name.
    const MOMENT_COUNT: Option<&'static str> = None;

    /// What the engine reads itself.
    fn settings(&self) -> Settings;

    /// Checks the values of the rule's own hyperparameters; the engine checks [`Rule::settings`].
    ///
    /// # Errors
    /// [`InvalidHyperparameter`](super::OptimError::InvalidHyperparameter) with the name and value of the first field at fault.
    fn validate(&self) -> Result<()>;

    /// Replaces the learning rate, which the engine has checked.
    fn set_lr(&mut self, lr: f64);

    /// Takes over from `own` how masters and moments are stored: a loaded state is brought into that form, whatever its hyperparameters say.
    fn keep_storage(&mut self, own: &Self) {
        let _ = own;
    }

    /// Whether steps use the moments. Moments that are not used keep their values.
    fn has_moments(&self) -> bool {
        !Self::MOMENTS.is_empty()
    }

    /// The update of one element, or of all elements at once: from the old value, the gradient after clipping and the moments to the
    /// new value; changes the moments. The closure should be `#[inline(always)]` and hold only numbers, so that its loop vectorizes.
    fn formula<V: Real>(&self, at: &Rates) -> impl Fn(V, V, &mut [V]) -> V + Copy + Sync;

    /// The numbers of `kernels/adamw.cu` if that kernel computes this rule.
    #[cfg(feature = "cuda")]
    fn adamw_kernel(&self) -> Option<fp8_candle::optim::AdamWHyperparameters> {
        None
    }
}

/// The settings of a rule whose hyperparameters are all valid.
pub(super) fn checked_settings(rule: &impl Rule) -> Result<Settings> {
    rule.validate()?;
    let settings = rule.settings();
    settings.validate()?;
    Ok(settings)
}
