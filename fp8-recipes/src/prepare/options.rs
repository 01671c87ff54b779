//! Options of `prepare_fp8`.

use crate::config::{ConfigError, LayerFilter, PathPattern, Recipe, check_history_len};
use crate::timings::{Computation, LayerTimings};
use fp8_core::setters;

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
    /// Recipes that cast operators ([`RecipeName::Direct`](crate::RecipeName), `Hybrid`) need it; without it a guard under such a recipe
    /// warns once of the operators that stay in high precision. Off by default.
    pub operators: bool,
    /// Whether to convert convolutions, under any recipe. On by default. FP8 checkpoints have no form for them, so an exported model
    /// is served with its convolutions in high precision; turn this off for the same computation before the export.
    pub convolutions: bool,
    /// The times by which [`PrepareOptions::auto`] decides.
    pub timings: LayerTimings,
    pub(super) auto: Option<Auto>,
    pub(super) output_fused: Vec<PathPattern>,
    pub(super) layers: Vec<(PathPattern, LayerChoice)>,
}

/// The calls for which layers are timed.
#[derive(Debug, Clone)]
pub(super) struct Auto {
    pub(super) computation: fn(Recipe) -> Computation,
    /// The recipe of the guard.
    pub(super) recipe: Recipe,
    pub(super) tokens: usize,
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
            timings: LayerTimings::default(),
            auto: None,
            output_fused: vec![],
            layers: vec![],
        }
    }
}

impl PrepareOptions {
    /// Converts only linear layers that train faster in FP8 than in high precision on this machine, by a measurement of each shape:
    /// forward and backward pass with `tokens` rows (sequences times their length) under `recipe`, with all casts. A layer with a
    /// recipe of its own is timed under that. The report has the times. They are kept in a file
    /// ([`PrepareOptions::with_timings`]), so only the first program with a shape measures it, for about half a second.
    ///
    /// Convolutions are off, because their time depends on more than the shape of their weight, and so are dense layers with batch axes,
    /// which another preparation of their part of the model converts. Where a layer gets fewer tokens than
    /// the model, as an expert does, prepare that part with its own number. To repeat a run elsewhere, take the choice from its
    /// report: another machine may choose differently.
    ///
    /// ```
    /// # use fp8_recipes as fp8;
    /// use candle_core::{DType, Device};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use fp8::timings::LayerTimings;
    /// use fp8::{PrepareOptions, RecipeName, nn, prepare_fp8};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let vars = VarMap::new();
    /// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// let model = vec![nn::linear(64, 512, vb.pp("up"))?, nn::linear(512, 4, vb.pp("head"))?];
    /// let options = PrepareOptions::auto(RecipeName::Delayed, 256);
    /// # let timings = LayerTimings::new().without_file().with_budget(std::time::Duration::from_millis(20));
    /// # let options = options.with_timings(timings);
    /// println!("{}", prepare_fp8(&model, &options)?);
    /// // head  [4, 512]  high precision: no faster in FP8 here: 0.210 ms against 0.134 ms for 256 tokens under `delayed`
    /// # Ok(()) }
    /// ```
    pub fn auto(recipe: impl Into<Recipe>, tokens: usize) -> Self {
        Self::timed(Computation::training, recipe.into(), tokens)
    }

    /// [`PrepareOptions::auto`] for a model that is only evaluated: times forward passes, between which no weight changes.
    pub fn auto_evaluation(recipe: impl Into<Recipe>, tokens: usize) -> Self {
        Self::timed(Computation::evaluation, recipe.into(), tokens)
    }

    fn timed(computation: fn(Recipe) -> Computation, recipe: Recipe, tokens: usize) -> Self {
        let auto = Auto {
            computation,
            recipe,
            tokens,
        };
        Self {
            auto: Some(auto),
            convolutions: false,
            ..Self::default()
        }
    }

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
    with_timings(timings: LayerTimings);
}

impl From<LayerFilter> for PrepareOptions {
    fn from(filter: LayerFilter) -> Self {
        Self::default().with_filter(filter)
    }
}
