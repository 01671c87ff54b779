//! The operands of attention's products: a choice that the model's `config.json` stores.

use candle_core::DType;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Operands {
    /// Tensors as they are: f32 where those are.
    F32,
    /// Rounded to bf16, as in mixed precision.
    Bf16,
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
            Self::Bf16 => Some(DType::BF16),
        }
    }
}
