//! Options of `prepare_fp8`.

use crate::config::{ConfigError, LayerFilter, PathPattern, Recipe, check_history_len};

/// Options of [`crate::prepare_fp8`]: what it converts, and the recipes of individual layers.
///
/// ```
/// # use fp8_recipes::{PrepareOptions, RecipeName};
/// let options = PrepareOptions::default()
///     .with_recipe("blocks.0.*", RecipeName::Rowwise)?
///     .with_off("lm_head")?;
/// # let _ = options;
/// # Ok::<(), fp8_recipes::config::ConfigError>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PrepareOptions {
    /// Which layers to take; the default takes all.
    pub filter: LayerFilter,
    /// Length of fresh amax histories; a delayed recipe of another length adapts them, keeping the newest entries.
    pub amax_history_len: usize,
    /// Whether to prepare operators without a GEMM of their own as well: embeddings, norms, [`nn::Matmul`](crate::nn::Matmul), ..
    /// Recipes that cast operators ([`RecipeName::Direct`](crate::RecipeName), `Hybrid`) need it. Off by default.
    pub operators: bool,
    /// Whether to convert convolutions, under any recipe. On by default. FP8 checkpoints have no form for them, so an exported model
    /// is served with its convolutions in high precision; turn this off for the same computation before the export.
    pub convolutions: bool,
    pub(super) output_fused: Vec<PathPattern>,
    pub(super) layers: Vec<(PathPattern, LayerChoice)>,
}

/// What a pattern says about the layers that it matches.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum LayerChoice {
    /// They follow this recipe inside every guard that computes in FP8 or calibrates, in place of the guard's.
    Recipe(Box<Recipe>),
    /// They stay in high precision.
    Off,
}

impl Default for PrepareOptions {
    fn default() -> Self {
        Self {
            filter: LayerFilter::default(),
            amax_history_len: 1024,
            operators: false,
            convolutions: true,
            output_fused: vec![],
            layers: vec![],
        }
    }
}

impl PrepareOptions {
    /// Leaves the outputs of the layers and operators that `pattern` names, and the gradients of these outputs, in high precision
    /// under recipes that cast outputs: where the next operator is fused with them, they are never written to memory. A path, or
    /// a glob ([`PathPattern`]).
    ///
    /// # Errors
    /// If the pattern is malformed.
    pub fn with_output_fused(mut self, pattern: &str) -> Result<Self, ConfigError> {
        self.output_fused.push(pattern.parse()?);
        Ok(self)
    }

    /// Gives a recipe of their own to the layers that `pattern` names: a path, or a glob ([`PathPattern`]). Where several patterns
    /// name a layer, the last one counts.
    ///
    /// # Errors
    /// If the pattern is malformed or the recipe inconsistent.
    pub fn with_recipe(
        self,
        pattern: &str,
        recipe: impl Into<Recipe>,
    ) -> Result<Self, ConfigError> {
        let recipe = recipe.into();
        recipe
            .resolve()
            .map_err(|source| ConfigError::LayerRecipe {
                pattern: pattern.to_string(),
                source: source.into(),
            })?;
        self.with_layer(pattern, LayerChoice::Recipe(recipe.into()))
    }

    /// Leaves the layers that `pattern` names in high precision: a path, or a glob ([`PathPattern`]). Where several patterns name
    /// a layer, the last one counts.
    ///
    /// # Errors
    /// If the pattern is malformed.
    pub fn with_off(self, pattern: &str) -> Result<Self, ConfigError> {
        self.with_layer(pattern, LayerChoice::Off)
    }

    fn with_layer(mut self, pattern: &str, choice: LayerChoice) -> Result<Self, ConfigError> {
        self.layers.push((pattern.parse()?, choice));
        Ok(self)
    }

    /// The patterns in the order in which they were given, with the choice of each.
    pub fn layers(&self) -> &[(PathPattern, LayerChoice)] {
        &self.layers
    }

    pub(super) fn is_output_fused(&self, path: &str) -> bool {
        self.output_fused
            .iter()
            .any(|pattern| pattern.matches(path))
    }

    /// The choice for the layer at `path`, and the pattern that made it.
    pub(super) fn choice(&self, path: &str) -> Option<(&PathPattern, &LayerChoice)> {
        let mut last_first = self.layers.iter().rev();
        let found = last_first.find(|(pattern, _)| pattern.matches(path));
        found.map(|(pattern, choice)| (pattern, choice))
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        check_history_len(self.amax_history_len)
    }
}

setters! { PrepareOptions:
    with_filter(filter: LayerFilter);
    with_operators(operators: bool);
    with_convolutions(convolutions: bool);
    with_amax_history_len(amax_history_len: usize);
}

impl From<LayerFilter> for PrepareOptions {
    fn from(filter: LayerFilter) -> Self {
        Self::default().with_filter(filter)
    }
}
