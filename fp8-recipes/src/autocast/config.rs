//! What a guard switches on.

use crate::config::Recipe;
use fp8_candle::state::ReductionGroup;
use std::sync::Arc;

/// What a guard switches on.
#[derive(Debug, Clone)]
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
}

impl Default for Autocast {
    fn default() -> Self {
        Self {
            enabled: true,
            calibrating: false,
            training: true,
            recipe: Recipe::default(),
            reduction_group: None,
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

    /// Sets the reduction group.
    pub fn reduction_group(mut self, group: Arc<dyn ReductionGroup>) -> Self {
        self.reduction_group = Some(group);
        self
    }
}

impl<R: Into<Recipe>> From<R> for Autocast {
    fn from(recipe: R) -> Self {
        Self::new(recipe)
    }
}
