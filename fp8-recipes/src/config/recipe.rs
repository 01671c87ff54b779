//! The type of all recipes.

use std::fmt;
use std::str::FromStr;

use fp8_candle::ops::AttentionProducts;
use fp8_core::{AmaxCompute, CustomAmax};
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::{ConfigError, DelayedScaling, Fp8LinearConfig, RecipeName, ResolvedConfig};

/// A recipe: how the layers under a guard use FP8.
///
/// Built from a name (`"rowwise".parse()`, [`RecipeName`]), from [`DelayedScaling`] or from an [`Fp8LinearConfig`]. In JSON
/// it is `{"linear": {..}}`, where fields may be left out; `{"delayed": {..}}` and the name of a recipe alone, such as
/// `"rowwise"`, are accepted too.
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
    /// Fills in defaults and checks that the casts fit together.
    ///
    /// # Errors
    /// A [`ConfigError`] that names the value at fault.
    pub fn resolve(&self) -> Result<ResolvedConfig, ConfigError> {
        match self {
            Recipe::Linear(config) => config.resolve(),
        }
    }

    /// A copy with these products of attention in FP8.
    ///
    /// ```
    /// use fp8_recipes::config::{AttentionProducts, Recipe};
    /// let recipe = "delayed".parse::<Recipe>()?.with_attention(AttentionProducts::all());
    /// assert!(recipe.to_string().ends_with(",a:all_e4m3)"));
    /// # Ok::<(), fp8_recipes::config::ConfigError>(())
    /// ```
    #[must_use]
    pub fn with_attention(self, attention: AttentionProducts) -> Self {
        let Recipe::Linear(config) = self;
        config.with_attention(attention).into()
    }

    /// A copy in which the custom reduction of this name is `function`: a recipe read from a checkpoint has only the name.
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

/// The name of a named recipe; `delayed(..)` with the settings that differ from the defaults; else `linear(..)` with the short
/// description of the casts, and of the rule of the delayed ones unless it is the default.
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
