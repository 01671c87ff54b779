//! Checkpoints of candle-nn's own optimizers, as far as their state is public.

use candle_nn::{AdamW, Optimizer, ParamsAdamW, SGD};
use serde::{Deserialize, Serialize};

use super::adamw::AdamWConfig;
use super::error::OptimError;
use super::settings::check_lr;
use super::state::{OptimizerState, ResumableOptimizer};

const ADAMW: &str = "candle_nn.AdamW";
const SGD_KIND: &str = "candle_nn.SGD";

/// candle-nn's `ParamsAdamW` in a state.
#[derive(Serialize, Deserialize)]
#[serde(remote = "ParamsAdamW", deny_unknown_fields)]
struct Params {
    lr: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
}

#[derive(Serialize, Deserialize)]
#[serde(transparent)]
struct Written(#[serde(with = "Params")] ParamsAdamW);

/// Checks the ranges that our own optimizer has.
fn check(params: &ParamsAdamW) -> Result<(), OptimError> {
    let config = AdamWConfig {
        lr: params.lr,
        beta1: params.beta1,
        beta2: params.beta2,
        eps: params.eps,
        weight_decay: params.weight_decay,
        ..AdamWConfig::default()
    };
    config.validate()
}

/// The hyperparameters are restored. The moments and the step counter are not: candle-nn keeps them private, so they can be neither saved
/// nor set. Load into a new optimizer, whose moments are zero, and expect noisy steps at first; loading warns in `tracing`.
/// [`fp8::optim::AdamW`](super::AdamW) computes the same updates and is restored completely.
impl ResumableOptimizer for AdamW {
    fn optimizer_state(&self) -> Result<OptimizerState, OptimError> {
        check(self.params())?;
        OptimizerState::new(ADAMW).with_hyperparameters(Written(self.params().clone()))
    }

    fn load_optimizer_state(&mut self, state: &OptimizerState) -> Result<(), OptimError> {
        state.check_kind(ADAMW)?;
        state.check_names(std::iter::empty::<String>())?;
        if let Some(Written(params)) = state.hyperparameters()? {
            check(&params)?;
            self.set_params(params);
        }
        tracing::warn!(
            "candle_nn::AdamW keeps its moments and step private: they were not saved, and start from zero. \
             fp8::optim::AdamW resumes exactly"
        );
        Ok(())
    }
}

/// Everything is restored: the learning rate is the only state of candle-nn's SGD.
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
