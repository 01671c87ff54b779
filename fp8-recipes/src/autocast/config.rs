//! What a guard switches on.

use crate::config::{ConfigError, Recipe};
use crate::stats::{CastObserver, CastStats};
use fp8_candle::state::ReductionGroup;
use std::sync::Arc;

/// What a guard switches on.
///
/// [`crate::fp8_autocast`] and [`crate::with_fp8`] take one, or what it is made from: the name of a recipe, a recipe, a
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
    /// Compute in FP8. False gives true high precision, also inside an enabled guard.
    pub enabled: bool,
    /// Compute in high precision and record amaxes for static scales; wins over `enabled`.
    pub calibrating: bool,
    /// Record amaxes and update scales. False (validation, generation) casts with the frozen scales and changes
    /// nothing; candle has no global no-grad, so the guard says it.
    pub training: bool,
    /// Which casts happen where.
    pub recipe: Recipe,
    /// Ranks over which amaxes are reduced, if the recipe reduces them.
    pub reduction_group: Option<Arc<dyn ReductionGroup>>,
    /// Where every cast of the layers inside is measured; None costs nothing.
    pub stats: Option<CastStats>,
    /// Who sees every cast of the layers inside; None costs nothing.
    pub cast_observer: Option<CastObserver>,
    /// As `stats`, but only while training.
    pub(crate) training_stats: Option<CastStats>,
}

impl Default for Autocast {
    fn default() -> Self {
        Self {
            enabled: true,
            calibrating: false,
            training: true,
            recipe: Recipe::default(),
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

    /// Sets `enabled`.
    pub fn enabled(mut self, enabled: bool) -> Self {
        self.enabled = enabled;
        self
    }

    /// Sets `calibrating`.
    pub fn calibrating(mut self, calibrating: bool) -> Self {
        self.calibrating = calibrating;
        self
    }

    /// Sets `training`.
    pub fn training(mut self, training: bool) -> Self {
        self.training = training;
        self
    }

    /// Measures every cast of the layers inside, also those of backward passes that run after the guard has closed. Copies
    /// each cast tensor to the host: for a look now and then, not for every step.
    pub fn with_stats(mut self, stats: &CastStats) -> Self {
        self.stats = Some(stats.clone());
        self
    }

    /// Shows every cast of the layers inside, also those of backward passes that run after the guard has closed.
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
