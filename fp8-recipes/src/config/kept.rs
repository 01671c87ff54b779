//! What the backward pass reads of activations.

use std::fmt;
use std::num::NonZeroUsize;

use serde::{Deserialize, Deserializer, Serialize};

use super::ConfigError;

/// How [transformer modules](crate::nn::TransformerLayer) keep what their backward pass reads besides the FP8 codes that they multiply: inputs
/// of norms and of activations, queries, keys and values, and what layers in high precision multiply.
///
/// In JSON `"high_precision"` or `{"fp8": {"group_size": 128}}`.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::config::{Fp8LinearConfig, KeptActivations};
/// use fp8::RecipeName;
/// let recipe = Fp8LinearConfig::from_recipe_name(RecipeName::Delayed).with_kept_activations(KeptActivations::fp8());
/// let json = serde_json::to_value(&recipe)?;
/// assert_eq!(json["kept_activations"]["fp8"]["group_size"], 128);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum KeptActivations {
    /// As they are.
    #[default]
    HighPrecision,
    /// As E4M3 codes, rounded to nearest even. The scale of each group of neighbouring features is a power of two from its amax, which
    /// leaves the codes their precision and makes casts faster; it takes four bytes. Results of the forward pass do not change; gradients are
    /// those at the rounded values. A group with Inf or NaN becomes NaN, and gradients that depend on it do too, so the optimizer skips the
    /// step.
    Fp8 {
        /// Features that share a scale; the last group of a token may have fewer.
        #[serde(deserialize_with = "non_zero", default = "default_size")]
        group_size: usize,
    },
}

fn non_zero<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    NonZeroUsize::deserialize(deserializer).map(NonZeroUsize::get)
}

fn default_size() -> usize {
    KeptActivations::GROUP_SIZE
}

impl KeptActivations {
    /// The features of a group by default: scales then add a 32nd to the bytes of the codes.
    pub const GROUP_SIZE: usize = 128;

    /// FP8 in groups of [`KeptActivations::GROUP_SIZE`].
    pub const fn fp8() -> Self {
        Self::Fp8 {
            group_size: Self::GROUP_SIZE,
        }
    }

    /// The features of a group, if values are kept in FP8.
    pub const fn group_size(self) -> Option<usize> {
        match self {
            Self::HighPrecision => None,
            Self::Fp8 { group_size } => Some(group_size),
        }
    }

    pub(super) fn check(self) -> Result<(), ConfigError> {
        match self {
            Self::Fp8 { group_size: 0 } => Err(ConfigError::EmptyGroup { got: 0 }),
            _ => Ok(()),
        }
    }
}

/// `high_precision`, or `fp8:128` with the features of a group.
impl fmt::Display for KeptActivations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HighPrecision => f.pad("high_precision"),
            Self::Fp8 { group_size } => write!(f, "fp8:{group_size}"),
        }
    }
}
