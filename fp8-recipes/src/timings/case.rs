//! What is timed: a linear layer of one shape in one kind of call.

use crate::config::Recipe;
use crate::error::{LayerError, Result};
use candle_core::DType;
use fp8_files::scheme::LayerScheme;
use std::fmt;

/// How a layer computes in FP8; in high precision the same layer multiplies values of the dtype of its inputs.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Computation {
    /// A step under the recipe: forward pass, backward pass with all three gradients, update of scales, and the cast of a weight that
    /// the optimizer has changed.
    Training(Box<Recipe>),
    /// A forward pass in an evaluation guard, with the codes of the weight kept from the call before.
    Evaluation(Box<Recipe>),
    /// A forward pass with a weight that was loaded as codes. In high precision it was decoded once.
    Served(LayerScheme),
}

impl Computation {
    /// [`Computation::Training`].
    pub fn training(recipe: impl Into<Recipe>) -> Self {
        Self::Training(Box::new(recipe.into()))
    }

    /// [`Computation::Evaluation`].
    pub fn evaluation(recipe: impl Into<Recipe>) -> Self {
        Self::Evaluation(Box::new(recipe.into()))
    }

    /// The recipe; None for a weight loaded as codes.
    pub fn recipe(&self) -> Option<&Recipe> {
        match self {
            Self::Training(recipe) | Self::Evaluation(recipe) => Some(recipe),
            Self::Served(_) => None,
        }
    }
}

impl fmt::Display for Computation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Training(recipe) => write!(f, "training under {recipe}"),
            Self::Evaluation(recipe) => write!(f, "evaluation under {recipe}"),
            Self::Served(scheme) => write!(f, "served: {scheme}"),
        }
    }
}

/// A linear layer without bias and the size of its calls. Prints as a few words.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LayerCase {
    /// How it computes in FP8.
    pub computation: Computation,
    /// Rows of the weight.
    pub out_features: usize,
    /// Columns of the weight.
    pub in_features: usize,
    /// Rows of the input: sequences times their lengths.
    pub tokens: usize,
    /// Dtype of inputs and results, and of a weight in high precision.
    pub dtype: DType,
}

impl LayerCase {
    /// A case with f32 inputs.
    pub fn new(
        computation: Computation,
        (out_features, in_features): (usize, usize),
        tokens: usize,
    ) -> Self {
        Self {
            computation,
            out_features,
            in_features,
            tokens,
            dtype: DType::F32,
        }
    }

    /// The same case with another dtype.
    #[must_use]
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// The key in the cache: [`Recipe`]'s own text leaves settings out, and so does the text of a scheme.
    pub(super) fn key(&self) -> Result<String> {
        let json = |value: serde_json::Result<String>| value.map_err(candle_core::Error::wrap);
        let computation = match &self.computation {
            Computation::Served(scheme) => {
                format!("served {}", json(serde_json::to_string(scheme))?)
            }
            Computation::Training(recipe) | Computation::Evaluation(recipe) => {
                let kind = match &self.computation {
                    Computation::Training(_) => "training",
                    _ => "evaluation",
                };
                match recipe.name() {
                    Some(name) => format!("{kind} {name}"),
                    None => format!("{kind} {}", json(serde_json::to_string(recipe))?),
                }
            }
        };
        let Self {
            out_features: n,
            in_features: k,
            tokens,
            dtype,
            ..
        } = self;
        Ok(format!(
            "linear {n}x{k}, {tokens} tokens, {}, {computation}",
            dtype.as_str()
        ))
    }

    pub(super) fn check(&self) -> Result<()> {
        if let Some(recipe) = self.computation.recipe() {
            recipe.resolve()?;
        }
        for (what, size) in [
            ("out_features", self.out_features),
            ("in_features", self.in_features),
            ("tokens", self.tokens),
        ] {
            if size == 0 {
                return Err(LayerError::EmptyCase { what }.into());
            }
        }
        Ok(())
    }
}

impl fmt::Display for LayerCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "[{}, {}], {} tokens of {}, {}",
            self.out_features,
            self.in_features,
            self.tokens,
            self.dtype.as_str(),
            self.computation
        )
    }
}
