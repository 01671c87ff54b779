//! The options of a guard.

use crate::config::{ConfigError, Recipe};
use crate::stats::{CastObserver, CastStats};
use fp8_candle::state::ReductionGroup;
use fp8_core::setters;
use std::sync::Arc;

/// The options of a guard.
///
/// [`crate::fp8_autocast`] and [`crate::with_fp8`] take them, or anything that converts to them: the name of a recipe, a recipe, a
/// configuration.
///
/// ```
/// # use fp8_recipes::{Autocast, RecipeName, fp8_autocast};
/// fp8_autocast("delayed")?.close()?;
/// fp8_autocast(Autocast::new(RecipeName::Rowwise).training(false))?.close()?;
/// assert!(fp8_autocast("delay").is_err());
/// # Ok::<(), fp8_recipes::Error>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Autocast {
    /// Whether to compute in FP8. False gives high precision, also inside an enabled guard.
    pub enabled: bool,
    /// Whether to compute in high precision and record amaxes for static scales. Takes precedence over `enabled`.
    pub calibrating: bool,
    /// Whether to record amaxes and update scales. False (validation, generation) casts with the current scales and changes no
    /// state. candle has no global no-grad mode that this could follow.
    pub training: bool,
    /// The casts.
    pub recipe: Recipe,
    /// The place of a micro-batch in its step, over all ranks: each draws the random bits of stochastic rounding by itself, so that a
    /// step gives the same bits however its micro-batches are divided over ranks. 0 if a step has one.
    pub micro_batch: u32,
    /// Ranks over which amaxes are reduced, if the recipe reduces them.
    pub reduction_group: Option<Arc<dyn ReductionGroup>>,
    /// Measures every cast of the layers inside; None costs nothing.
    pub stats: Option<CastStats>,
    /// Called for every cast of the layers inside; None costs nothing.
    pub cast_observer: Option<CastObserver>,
    /// Like `stats`, but only while training.
    pub(crate) training_stats: Option<CastStats>,
}

impl Default for Autocast {
    fn default() -> Self {
        Self {
            enabled: true,
            calibrating: false,
            training: true,
            recipe: Recipe::default(),
            micro_batch: 0,
            reduction_group: None,
            stats: None,
            cast_observer: None,
            training_stats: None,
        }
    }
}

impl Autocast {
    /// Training with `recipe`.
    pub fn new(recipe: impl Into<Recipe>) -> Self {
        Self {
            recipe: recipe.into(),
            ..Self::default()
        }
    }

    /// High precision.
    pub fn disabled() -> Self {
        Self {
            enabled: false,
            ..Self::default()
        }
    }

    /// Measures every cast of the layers inside, including casts of backward passes that run after the guard has closed. Copies
    /// each cast tensor to the host, so it is meant for occasional steps.
    pub fn with_stats(mut self, stats: &CastStats) -> Self {
        self.stats = Some(stats.clone());
        self
    }

    /// Calls `observer` for every cast of the layers inside, including casts of backward passes that run after the guard has closed.
    pub fn with_cast_observer(mut self, observer: &CastObserver) -> Self {
        self.cast_observer = Some(observer.clone());
        self
    }

    /// Sets the reduction group.
    pub fn reduction_group(mut self, group: Arc<dyn ReductionGroup>) -> Self {
        self.reduction_group = Some(group);
        self
    }
}

setters! { Autocast:
    enabled(enabled: bool);
    calibrating(calibrating: bool);
    training(training: bool);
    micro_batch(micro_batch: u32);
}

impl TryFrom<&str> for Autocast {
    type Error = ConfigError;

    /// Training with the recipe of this name.
    fn try_from(recipe: &str) -> Result<Self, ConfigError> {
        recipe.parse::<Recipe>().map(Self::new)
    }
}

impl<R: Into<Recipe>> From<R> for Autocast {
    fn from(recipe: R) -> Self {
        Self::new(recipe)
    }
}
