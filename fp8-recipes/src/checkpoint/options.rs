//! What may differ between a checkpoint and the run that goes on from it, and what became of its parts.

use super::meta::{TrainingMeta, recipe_text};
use crate::config::Recipe;
use std::fmt;
use std::path::PathBuf;

/// What [`resume_training_with`](super::resume_training_with) lets differ. By default nothing, as in
/// [`resume_training`](super::resume_training).
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::checkpoint::ResumeOptions;
/// // From f32 with candle's AdamW to FP8 with this library's.
/// let options = ResumeOptions::new().allow_recipe_change(true).fresh_optimizer(true);
/// # let _ = options;
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ResumeOptions {
    /// See [`ResumeOptions::allow_recipe_change`].
    pub allow_recipe_change: bool,
    /// See [`ResumeOptions::fresh_fp8_state`].
    pub fresh_fp8_state: bool,
    /// See [`ResumeOptions::fresh_optimizer`].
    pub fresh_optimizer: bool,
    /// See [`ResumeOptions::keep_hyperparameters`].
    pub keep_hyperparameters: bool,
}

impl ResumeOptions {
    /// Nothing may differ.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether the run may go on with another recipe than the checkpoint's, from f32 to FP8 and back included.
    ///
    /// Where the recipes are equal, the FP8 state comes back, as without this option. Where they differ, all of it starts fresh, as
    /// after [`prepare_fp8`](crate::prepare_fp8): histories are empty, and scales are those with which the new recipe begins
    /// ([`InitialScale`](crate::config::InitialScale) of delayed scaling). None of the old rows is kept, because their scales follow
    /// another rule, and a calibration describes no weight that is trained on.
    pub fn allow_recipe_change(mut self, allow: bool) -> Self {
        self.allow_recipe_change = allow;
        self
    }

    /// Whether the FP8 state starts fresh although the recipe is the same: for a model in which other layers are prepared than in
    /// the one that was saved.
    pub fn fresh_fp8_state(mut self, fresh: bool) -> Self {
        self.fresh_fp8_state = fresh;
        self
    }

    /// Whether the optimizer's part of the checkpoint is left out. The optimizer stays as it is: give it newly made. For a run that
    /// goes on with another optimizer, or that only evaluates ([`NoOptimizer`](crate::optim::NoOptimizer)).
    pub fn fresh_optimizer(mut self, fresh: bool) -> Self {
        self.fresh_optimizer = fresh;
        self
    }

    /// Whether the optimizer keeps its own hyperparameters, such as another learning rate, while its tensors and its step come back.
    pub fn keep_hyperparameters(mut self, keep: bool) -> Self {
        self.keep_hyperparameters = keep;
        self
    }
}

/// Where a part of the run comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Restored {
    /// From the checkpoint.
    FromCheckpoint,
    /// It begins anew.
    Fresh,
}

impl fmt::Display for Restored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::FromCheckpoint => "from the checkpoint",
            Self::Fresh => "fresh",
        })
    }
}

/// What [`resume_training_with`](super::resume_training_with) has done. Prints as a few lines.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ResumeReport {
    /// The checkpoint.
    pub path: PathBuf,
    /// Its metadata; the recipe in it is the one that it was saved with.
    pub meta: TrainingMeta,
    /// The recipe of the run that goes on.
    pub recipe: Option<Recipe>,
    /// Names of the variables, all of which come from the checkpoint.
    pub variables: Vec<String>,
    /// Scales, histories and calibration of the prepared layers.
    pub fp8_state: Restored,
    /// How many prepared layers the model has.
    pub fp8_layers: usize,
    /// The optimizer's state.
    pub optimizer: Restored,
}

impl ResumeReport {
    /// Whether the run goes on with another recipe.
    pub fn recipe_changed(&self) -> bool {
        self.meta.recipe != self.recipe
    }
}

impl fmt::Display for ResumeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}, step {}", self.path.display(), self.meta.step)?;
        let recipe = recipe_text(self.recipe.as_ref());
        match self.recipe_changed() {
            true => {
                let before = recipe_text(self.meta.recipe.as_ref());
                writeln!(f, "  recipe: {recipe}, was {before}")?;
            }
            false => writeln!(f, "  recipe: {recipe}")?,
        }
        let (variables, layers) = (self.variables.len(), self.fp8_layers);
        writeln!(f, "  variables ({variables}): {}", Restored::FromCheckpoint)?;
        writeln!(f, "  FP8 state (layers: {layers}): {}", self.fp8_state)?;
        write!(f, "  optimizer: {}", self.optimizer)
    }
}
