//! Rank, weight and dropout of an update.

use crate::error::Result;
use crate::nn::transformer::config::{check_dropout, unfit};
use fp8_core::setters;

/// Rank, weight and dropout of the update of a [`LoraLinear`](super::LoraLinear).
///
/// ```
/// use fp8_recipes::nn::LoraConfig;
/// let config = LoraConfig::new(16).with_alpha(32.).with_dropout(0.05);
/// assert_eq!(config.factor(), 2.);
/// assert_eq!(config.with_rslora(true).factor(), 8.);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct LoraConfig {
    /// Features between the two matrices.
    pub rank: usize,
    /// The update is multiplied by `alpha / rank`; by default it is the rank.
    pub alpha: f64,
    /// Whether the update is multiplied by `alpha / sqrt(rank)` instead, so that its size does not fall with the rank.
    pub rslora: bool,
    /// The share of the update's inputs that is dropped in training.
    pub dropout: f32,
}

impl LoraConfig {
    /// An update of this rank, multiplied by 1, without dropout.
    pub fn new(rank: usize) -> Self {
        Self {
            rank,
            alpha: rank as f64,
            rslora: false,
            dropout: 0.,
        }
    }

    /// What the update is multiplied by.
    pub fn factor(&self) -> f64 {
        match self.rslora {
            true => self.alpha / (self.rank as f64).sqrt(),
            false => self.alpha / self.rank as f64,
        }
    }

    pub(super) fn check(&self, path: &str) -> Result<()> {
        if self.rank == 0 {
            return Err(unfit(path, "LoraConfig::rank", 0, "at least 1"));
        }
        if !self.alpha.is_finite() {
            let expected = "a finite number";
            return Err(unfit(path, "LoraConfig::alpha", self.alpha, expected));
        }
        check_dropout(path, "LoraConfig::dropout", self.dropout)
    }
}

setters! { LoraConfig:
    with_alpha(alpha: f64);
    with_rslora(rslora: bool);
    with_dropout(dropout: f32);
}
