//! What the products of attention multiply: a choice of the model, which its `config.json` keeps.

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
    /// The default of a run with an FP8 recipe, and of others.
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
