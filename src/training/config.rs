//! The settings of a trainer.

use super::error::{Error, Result};
use crate::optim::{AdamWConfig, LrSchedule};
use crate::{PrepareOptions, Recipe};
use fp8_core::setters;
use serde_json::{Value, json};

/// What a [`Trainer`](super::Trainer) does with a model, besides its [`Objective`](super::Objective).
///
/// ```
/// use fp8::RecipeName;
/// use fp8::optim::LrSchedule;
/// use fp8::training::TrainerConfig;
/// let config = TrainerConfig::new(LrSchedule::cosine(2e-5, 20, 300))
///     .with_recipe(Some(RecipeName::Delayed.into()))
///     .with_micro_batches(2);
/// # assert_eq!(config.micro_batches, 2);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct TrainerConfig {
    /// The learning rate of each step.
    pub schedule: LrSchedule,
    /// The optimizer; its learning rate is that of the schedule.
    pub optimizer: AdamWConfig,
    /// How linear layers compute; None for high precision.
    pub recipe: Option<Recipe>,
    /// Which layers, and other recipes for some.
    pub prepare: PrepareOptions,
    /// Parts of a batch whose gradients are computed one after the other and added.
    pub micro_batches: usize,
    /// Measures the casts of every step whose number is a multiple of this.
    pub stats_every: Option<u64>,
    /// Further settings that a resumed run must agree with, such as those of the data.
    pub settings: Value,
}

impl TrainerConfig {
    /// AdamW with this schedule, gradients clipped to a norm of 1, in high precision.
    pub fn new(schedule: LrSchedule) -> Self {
        Self {
            schedule,
            optimizer: AdamWConfig {
                max_grad_norm: Some(1.),
                ..AdamWConfig::default()
            },
            recipe: None,
            prepare: PrepareOptions::default(),
            micro_batches: 1,
            stats_every: None,
            settings: Value::Null,
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        match self.micro_batches {
            0 => Err(Error::Setting {
                key: "micro_batches",
                value: "0".into(),
                expected: "at least 1",
            }),
            _ => Ok(()),
        }
    }

    /// What a resumed run must agree with; `data` is the fingerprint of its objective.
    pub(super) fn fixed(&self, data: String) -> Value {
        json!({
            "schedule": self.schedule,
            "optimizer": format!("{:?}", self.optimizer),
            "micro_batches": self.micro_batches,
            "data": data,
            "settings": self.settings,
        })
    }
}

setters! { TrainerConfig:
    /// Sets the optimizer.
    with_optimizer(optimizer: AdamWConfig);
    /// Sets the recipe.
    with_recipe(recipe: Option<Recipe>);
    /// Sets which layers are converted.
    with_prepare(prepare: PrepareOptions);
    /// Sets the number of parts of a batch.
    with_micro_batches(micro_batches: usize);
    /// Sets which steps are measured.
    with_stats_every(stats_every: Option<u64>);
    /// Sets what else a resumed run must agree with.
    with_settings(settings: Value);
}
