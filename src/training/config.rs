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
    /// The recipe of linear layers; None for high precision.
    pub recipe: Option<Recipe>,
    /// The last step under the recipe. Later steps and validations compute in high precision, as the written model will. None, the
    /// default, for all steps under the recipe.
    pub last_recipe_step: Option<u64>,
    /// Which layers follow it, and other recipes for some of them; only with a recipe. None, the default, takes all.
    pub prepare: Option<PrepareOptions>,
    /// Parts of a batch whose gradients are computed one after the other and added.
    pub micro_batches: usize,
    /// Measures the casts of every step whose number is a multiple of this, at least 1; only under a recipe.
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
            last_recipe_step: None,
            prepare: None,
            micro_batches: 1,
            stats_every: None,
            settings: Value::Null,
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        let wrong = |key, value: String, expected| {
            Err(Error::Setting {
                key,
                value,
                expected,
            })
        };
        let (micro_batches, stats_every) = (self.micro_batches, self.stats_every);
        if micro_batches == 0 {
            return wrong("micro_batches", "0".into(), "at least 1");
        }
        if stats_every == Some(0) {
            return wrong("stats_every", "0".into(), "at least 1");
        }
        if self.last_recipe_step == Some(0) {
            return wrong("last_recipe_step", "0".into(), "at least 1");
        }
        if self.recipe.is_some() {
            return Ok(());
        }
        let without = "None without a recipe";
        match (stats_every, self.last_recipe_step, &self.prepare) {
            (Some(steps), _, _) => wrong("stats_every", steps.to_string(), without),
            (_, Some(step), _) => wrong("last_recipe_step", step.to_string(), without),
            (_, _, Some(options)) => wrong("prepare", format!("{options:?}"), without),
            _ => Ok(()),
        }
    }

    /// What a resumed run must agree with; `data` is the fingerprint of its objective.
    pub(super) fn fixed(&self, data: String) -> Value {
        json!({
            "schedule": self.schedule,
            "optimizer": self.optimizer,
            "last_recipe_step": self.last_recipe_step,
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
    /// Sets the last step under the recipe.
    with_last_recipe_step(last_recipe_step: Option<u64>);
    /// Sets which layers are converted.
    with_prepare(prepare: Option<PrepareOptions>);
    /// Sets the number of parts of a batch.
    with_micro_batches(micro_batches: usize);
    /// Sets which steps are measured.
    with_stats_every(stats_every: Option<u64>);
    /// Sets what else a resumed run must agree with.
    with_settings(settings: Value);
}
