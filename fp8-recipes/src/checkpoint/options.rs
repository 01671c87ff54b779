//! What may differ between a checkpoint and the run that resumes it, and what was restored.

use super::meta::{TrainingMeta, recipe_text};
use crate::config::Recipe;
use fp8_core::setters;
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
    /// Whether the run may continue with another recipe than the checkpoint's, including from f32 to FP8 and back.
    ///
    /// If the recipes are equal, the FP8 state is restored, as without this option. If they differ, all of it starts fresh, as after
    /// [`prepare_fp8`](crate::prepare_fp8): histories are empty, and scales are the initial ones of the new recipe
    /// ([`InitialScale`](crate::config::InitialScale) of delayed scaling). No old row is kept, because its scale follows another
    /// rule, and no calibration, because it does not describe a weight that is trained further.
    pub allow_recipe_change: bool,
    /// Whether the FP8 state starts fresh although the recipe is the same: for a model with other prepared layers than the saved one.
    pub fresh_fp8_state: bool,
    /// Whether to skip the optimizer's part of the checkpoint. The optimizer is not changed, so pass a new one. For a run that
    /// continues with another optimizer, or only evaluates ([`NoOptimizer`](crate::optim::NoOptimizer)).
    pub fresh_optimizer: bool,
    /// Whether the optimizer keeps its own hyperparameters, such as another learning rate, while its tensors and step are restored.
    pub keep_hyperparameters: bool,
}

impl ResumeOptions {
    /// The defaults: nothing may differ.
    pub fn new() -> Self {
        Self::default()
    }
}

setters! { ResumeOptions:
    allow_recipe_change(allow_recipe_change: bool);
    fresh_fp8_state(fresh_fp8_state: bool);
    fresh_optimizer(fresh_optimizer: bool);
    keep_hyperparameters(keep_hyperparameters: bool);
}

/// Where a part of the run comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Restored {
    /// From the checkpoint.
    FromCheckpoint,
    /// It starts fresh.
    Fresh,
}

names! { Restored::name: FromCheckpoint = "from the checkpoint", Fresh = "fresh" }

/// What [`resume_training_with`](super::resume_training_with) has restored. Prints as a few lines.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ResumeReport {
    /// The checkpoint.
    pub path: PathBuf,
    /// Its metadata; the recipe in it is the one that it was saved with.
    pub meta: TrainingMeta,
    /// The recipe of the resumed run.
    pub recipe: Option<Recipe>,
    /// Names of the variables, all restored from the checkpoint.
    pub variables: Vec<String>,
    /// Scales, histories and calibration of the prepared layers.
    pub fp8_state: Restored,
    /// How many prepared layers the model has.
    pub fp8_layers: usize,
    /// The optimizer's state.
    pub optimizer: Restored,
}

impl ResumeReport {
    /// Whether the run continues with another recipe.
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
