//! Checkpoints of candle-nn's own optimizers, as far as their state is public.

use candle_nn::{AdamW, Optimizer, ParamsAdamW, SGD};
use serde::{Deserialize, Serialize};

use super::adamw::AdamWConfig;
use super::error::OptimError;
use super::settings::check_lr;
use super::state::{OptimizerState, ResumableOptimizer};

const ADAMW: &str = "candle_nn.AdamW";
const SGD_KIND: &str = "candle_nn.SGD";

/// candle-nn's `ParamsAdamW`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {
    lr: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
}

impl Params {
    fn of(params: &ParamsAdamW) -> Result<Self, OptimError> {
        let ParamsAdamW {
            lr,
            beta1,
            beta2,
            eps,
            weight_decay,
        } = *params;
        let own = Self {
            lr,
            beta1,
            beta2,
            eps,
            weight_decay,
        };
        own.checked()
    }

    /// The ranges are those of our own optimizer.
    fn checked(self) -> Result<Self, OptimError> {
        let config = AdamWConfig {
            lr: self.lr,
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps,
            weight_decay: self.weight_decay,
            ..AdamWConfig::default()
        };
        config.validate()?;
        Ok(self)
    }
}

/// The hyperparameters are restored. The moments and the step counter are not: candle-nn keeps them private, so they can be neither saved
/// nor set. Load into a newly made optimizer, whose moments are zero, and expect the noisy steps of a beginning; loading warns in `tracing`.
/// [`fp8::optim::AdamW`](super::AdamW) computes the same updates and is restored completely.
impl ResumableOptimizer for AdamW {
    fn optimizer_state(&self) -> Result<OptimizerState, OptimError> {
        OptimizerState::new(ADAMW).with_hyperparameters(Params::of(self.params())?)
    }

    fn load_optimizer_state(&mut self, state: &OptimizerState) -> Result<(), OptimError> {
        state.check_kind(ADAMW)?;
        state.check_names(std::iter::empty::<String>())?;
        let params = state.hyperparameters::<Params>()?;
        if let Some(params) = params.map(Params::checked).transpose()? {
            self.set_params(ParamsAdamW {
                lr: params.lr,
                beta1: params.beta1,
                beta2: params.beta2,
                eps: params.eps,
                weight_decay: params.weight_decay,
            });
        }
        tracing::warn!(
            "candle_nn::AdamW keeps its moments and step private: they were not saved, and start from zero. \
             fp8_recipes::optim::AdamW resumes exactly"
        );
        Ok(())
    }
}

/// Complete: candle-nn's SGD has no state but its learning rate.
impl ResumableOptimizer for SGD {
    fn optimizer_state(&self) -> Result<OptimizerState, OptimError> {
        check_lr(self.learning_rate())?;
        OptimizerState::new(SGD_KIND).with_hyperparameters(self.learning_rate())
    }

    fn load_optimizer_state(&mut self, state: &OptimizerState) -> Result<(), OptimError> {
        state.check_kind(SGD_KIND)?;
        state.check_names(std::iter::empty::<String>())?;
        if let Some(lr) = state.hyperparameters::<f64>()? {
            check_lr(lr)?;
            self.set_learning_rate(lr);
        }
        Ok(())
    }
}
