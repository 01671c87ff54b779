//! The operands of attention's products: a choice that the model's `config.json` stores.

use candle_core::DType;
use clap::ValueEnum;
use fp8::Recipe;
use fp8::config::AttentionProducts;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Operands {
    /// Tensors as they are: f32 where those are.
    F32,
    /// Rounded to bf16, as in mixed precision.
    Bf16,
    /// All products in FP8 where a recipe is in force, elsewhere rounded to bf16.
    Fp8,
}

impl Operands {
    /// The default: bf16 for a run with an FP8 recipe, else f32.
    pub fn of_run(fp8: bool) -> Self {
        match fp8 {
            true => Self::Bf16,
            false => Self::F32,
        }
    }

    /// For `AttentionConfig::operands`.
    pub fn dtype(self) -> Option<DType> {
        match self {
            Self::F32 => None,
            Self::Bf16 | Self::Fp8 => Some(DType::BF16),
        }
    }

    /// `recipe` with these operands.
    pub fn in_recipe(self, recipe: Recipe) -> Recipe {
        match self {
            Self::Fp8 => recipe.with_attention(AttentionProducts::all()),
            Self::F32 | Self::Bf16 => recipe,
        }
    }
}
