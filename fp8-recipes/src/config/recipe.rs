//! Named recipes, and the one type that stands for any recipe.

use std::fmt;
use std::str::FromStr;

use fp8_core::{AmaxCompute, CustomAmax};
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::{ConfigError, DelayedScaling, Fp8LinearConfig, ResolvedConfig};

/// The recipes that have a name.
///
/// | name | input, weight | grad_output | extras |
/// |---|---|---|---|
/// | `tensorwise` | dynamic tensorwise E4M3 | dynamic tensorwise E5M2 | exact scales |
/// | `rowwise` | dynamic rowwise E4M3 | dynamic rowwise E4M3 | power-of-two scales |
/// | `rowwise_with_gw_hp` | rowwise E4M3; w for grad_input tensorwise | rowwise E4M3 | grad_weight in high precision; power-of-two scales |
/// | `delayed` | delayed tensorwise E4M3 | delayed tensorwise E5M2 | [`DelayedScaling`]'s defaults |
/// | `current` | current tensorwise E4M3 | current tensorwise E5M2 | Transformer Engine's `Float8CurrentScaling` |
/// | `blockwise` | E4M3; x by 1x128, w by 128x128 | E4M3 by 1x128 | power-of-two scales: Transformer Engine's `Float8BlockScaling`, DeepSeek's layout |
/// | `direct` | E5M2 without scales, all tensors of all operators | E5M2 without scales, stochastically rounded | the FP8 Emulation Toolkit's; beyond the range is Inf |
/// | `hybrid` | E4M3 with scales from the tensor, all tensors of all operators | as `direct` | the toolkit's scaled hybrid |
/// | `mxfp8` | E4M3 by 32 with E8M0 scales | E4M3 by 32 | OCP microscaling, scales by RCEIL: torchao's `mxfp8`, Transformer Engine's `MXFP8BlockScaling` |
///
/// Blocks and groups of 32 run along the dimension that a GEMM sums over, so `blockwise` and `mxfp8` cast inputs and gradients
/// once for each of their two GEMMs, as `rowwise` does.
///
/// `direct` and `hybrid` cast outputs and the gradients of inputs and weights too, and the tensors of embeddings, norms, sums and
/// products where [`PrepareOptions::operators`](crate::PrepareOptions) has prepared them. They need loss scaling:
/// [`Emulator`](crate::emulation::Emulator).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RecipeName {
    /// The fastest: one scale per tensor, from the tensor itself.
    Tensorwise,
    /// More accurate: one scale per row, robust against outlier rows.
    Rowwise,
    /// The most accurate: as rowwise, with the weight's gradient in high precision.
    RowwiseWithGwHp,
    /// One scale per tensor, from earlier steps.
    Delayed,
    /// One scale per tensor, from the tensor itself by Transformer Engine's rule.
    Current,
    /// One scale per 128 elements of inputs and gradients, one per 128x128 of weights.
    Blockwise,
    /// One power-of-two scale per 32 elements.
    Mxfp8,
    /// Every tensor of every operator in E5M2, without scales.
    Direct,
    /// Every tensor of every operator: E4M3 with scales forward, E5M2 without scales backward.
    Hybrid,
}

impl RecipeName {
    /// Every name.
    pub const ALL: [RecipeName; 9] = [
        RecipeName::Tensorwise,
        RecipeName::Rowwise,
        RecipeName::RowwiseWithGwHp,
        RecipeName::Delayed,
        RecipeName::Current,
        RecipeName::Blockwise,
        RecipeName::Mxfp8,
        RecipeName::Direct,
        RecipeName::Hybrid,
    ];

    /// The name as it is written.
    pub fn as_str(self) -> &'static str {
        match self {
            RecipeName::Tensorwise => "tensorwise",
            RecipeName::Rowwise => "rowwise",
            RecipeName::RowwiseWithGwHp => "rowwise_with_gw_hp",
            RecipeName::Delayed => "delayed",
            RecipeName::Current => "current",
            RecipeName::Blockwise => "blockwise",
            RecipeName::Mxfp8 => "mxfp8",
            RecipeName::Direct => "direct",
            RecipeName::Hybrid => "hybrid",
        }
    }
}

impl fmt::Display for RecipeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for RecipeName {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        Self::ALL
            .into_iter()
            .find(|name| name.as_str() == text)
            .ok_or_else(|| {
                let valid = Self::ALL.map(RecipeName::as_str).join(", ");
                ConfigError::UnknownRecipe {
                    got: text.to_string(),
                    valid,
                }
            })
    }
}

/// A recipe: how the layers under a guard use FP8.
///
/// Made from a name (`"rowwise".parse()`, [`RecipeName`]), from [`DelayedScaling`] or from an [`Fp8LinearConfig`]. In JSON
/// `{"linear": {..}}`, where fields may be left out; `{"delayed": {..}}` and the bare name of a recipe, such as `"rowwise"`,
/// are read too.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Recipe {
    /// The casts and GEMMs of linear layers.
    Linear(Fp8LinearConfig),
}

impl Default for Recipe {
    fn default() -> Self {
        RecipeName::Delayed.into()
    }
}

impl Recipe {
    /// Fills in what was left open and checks the whole.
    ///
    /// # Errors
    /// A [`ConfigError`] that names the value at fault.
    pub fn resolve(&self) -> Result<ResolvedConfig, ConfigError> {
        match self {
            Recipe::Linear(config) => config.resolve(),
        }
    }

    /// A copy in which the custom reduction of this name is `function`: recipes that come back from a checkpoint know
    /// its name only.
    ///
    /// # Errors
    /// [`ConfigError::OtherAmax`] if the recipe does not reduce histories by a function of this name.
    pub fn bind_amax_compute(self, function: &CustomAmax) -> Result<Self, ConfigError> {
        let Recipe::Linear(mut config) = self;
        match &config.delayed.amax_compute {
            AmaxCompute::Custom(custom) if custom.name() == function.name() => {
                config.delayed.amax_compute = AmaxCompute::Custom(function.clone());
                Ok(config.into())
            }
            other => Err(ConfigError::OtherAmax {
                wanted: other.to_string(),
                given: function.name().to_string(),
            }),
        }
    }

    /// The name, if this is a named recipe unchanged.
    pub fn name(&self) -> Option<RecipeName> {
        RecipeName::ALL
            .into_iter()
            .find(|name| *self == Recipe::from(*name))
    }
}

impl From<DelayedScaling> for Fp8LinearConfig {
    fn from(delayed: DelayedScaling) -> Self {
        Self::from_recipe_name(RecipeName::Delayed).with_delayed(delayed)
    }
}

impl From<DelayedScaling> for Recipe {
    fn from(delayed: DelayedScaling) -> Self {
        Recipe::Linear(delayed.into())
    }
}

impl From<Fp8LinearConfig> for Recipe {
    fn from(config: Fp8LinearConfig) -> Self {
        Recipe::Linear(config)
    }
}

impl From<RecipeName> for Recipe {
    fn from(name: RecipeName) -> Self {
        Recipe::Linear(Fp8LinearConfig::from_recipe_name(name))
    }
}

impl FromStr for Recipe {
    type Err = ConfigError;

    /// A recipe from its name.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        text.parse::<RecipeName>().map(Recipe::from)
    }
}

impl TryFrom<&str> for Recipe {
    type Error = ConfigError;

    fn try_from(text: &str) -> Result<Self, ConfigError> {
        text.parse()
    }
}

/// The name of a named recipe; `delayed(..)` with what differs from the defaults; else `linear(..)` with the short
/// description of the casts, and of the rule of delayed ones where it is not the default.
impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Recipe::Linear(config) = self;
        if let Some(name) = self.name() {
            return name.fmt(f);
        }
        if *config == Fp8LinearConfig::from(config.delayed.clone()) {
            return config.delayed.fmt(f);
        }
        match config.resolve() {
            Err(error) => write!(f, "linear(invalid: {error})"),
            Ok(resolved) => match &resolved.delayed {
                Some(delayed) if *delayed != DelayedScaling::default() => {
                    write!(f, "linear({resolved}; {delayed})")
                }
                _ => write!(f, "linear({resolved})"),
            },
        }
    }
}

impl<'de> Deserialize<'de> for Recipe {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameOrMap;

        impl<'de> Visitor<'de> for NameOrMap {
            type Value = Recipe;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a recipe, or an object with `delayed` or `linear`")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Recipe, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Recipe, A::Error> {
                match Tagged::deserialize(MapAccessDeserializer::new(map))? {
                    Tagged::Delayed(delayed) => Ok(delayed.into()),
                    Tagged::Linear(config) => Ok(Recipe::Linear(*config)),
                }
            }
        }

        /// The forms that serde can derive.
        #[derive(Deserialize)]
        #[serde(rename_all = "snake_case")]
        enum Tagged {
            Delayed(DelayedScaling),
            Linear(Box<Fp8LinearConfig>),
        }

        deserializer.deserialize_any(NameOrMap)
    }
}
