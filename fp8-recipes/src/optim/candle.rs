//! Checkpoints of candle-nn's own optimizers, as far as they show their state.

use candle_nn::{AdamW, Optimizer, ParamsAdamW, SGD};
use serde::{Deserialize, Serialize};

use super::checkpoint::{CheckpointOptimizer, OptimizerState};
use super::params::check_lr;
use super::{AdamWConfig, OptimError};

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

/// The hyperparameters come back. The moments and the step counter do not: candle-nn keeps them private, so they can
/// neither be saved nor set. Load into a newly made optimizer, whose moments are zero, and expect steps with the noise of a
/// beginning; loading says so with a warning in `tracing`. [`fp8_recipes::optim::AdamW`](super::AdamW) computes the same
/// updates and comes back whole.
impl CheckpointOptimizer for AdamW {
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
impl CheckpointOptimizer for SGD {
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
