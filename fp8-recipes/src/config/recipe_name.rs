//! The named recipes, each defined completely in this file.

use std::str::FromStr;

use fp8_core::{Format, Overflow};
use serde::{Deserialize, Serialize};

use super::{CastConfig, CastRounding, ConfigError, DelayedScaling, Fp8LinearConfig, GemmConfig};

/// Rows and columns of a block of a weight, and inputs of a token that share a scale, as in DeepSeek-V3 and Transformer
/// Engine.
const BLOCK: usize = 128;

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
/// `direct` and `hybrid` also cast outputs, the gradients of inputs and weights, and the tensors of embeddings, norms, sums and
/// products that [`PrepareOptions::operators`](crate::PrepareOptions) has prepared. They need loss scaling:
/// [`Emulator`](crate::emulation::Emulator).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RecipeName {
    /// One scale per tensor, from the tensor itself: no state between steps.
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

names! { pub RecipeName::as_str, pub ALL:
    Tensorwise = "tensorwise",
    Rowwise = "rowwise",
    RowwiseWithGwHp = "rowwise_with_gw_hp",
    Delayed = "delayed",
    Current = "current",
    Blockwise = "blockwise",
    Mxfp8 = "mxfp8",
    Direct = "direct",
    Hybrid = "hybrid",
}

impl Fp8LinearConfig {
    /// The configuration of a named recipe.
    pub fn from_recipe_name(name: RecipeName) -> Self {
        let tensorwise = Self::default();
        let rowwise = CastConfig::dynamic_rowwise();
        match name {
            RecipeName::Tensorwise => tensorwise,
            RecipeName::Rowwise => tensorwise
                .with_input(rowwise)
                .with_weight(rowwise)
                .with_grad_output(rowwise.with_format(Format::E4M3))
                .with_round_scales_to_power_of_two(true),
            RecipeName::RowwiseWithGwHp => Self::from_recipe_name(RecipeName::Rowwise)
                .with_weight_for_grad_input(Some(CastConfig::dynamic_tensorwise()))
                .with_input_for_grad_weight(Some(CastConfig::disabled()))
                .with_grad_output_for_grad_weight(Some(CastConfig::disabled())),
            RecipeName::Delayed => tensorwise.with_casts(CastConfig::delayed_tensorwise()),
            RecipeName::Current => tensorwise.with_casts(CastConfig::current_tensorwise()),
            RecipeName::Blockwise => tensorwise
                .with_casts(CastConfig::dynamic_blockwise(1, BLOCK).with_format(Format::E4M3))
                .with_weight(CastConfig::dynamic_blockwise(BLOCK, BLOCK))
                .with_gemm_output(GemmConfig::new(false))
                .with_round_scales_to_power_of_two(true),
            RecipeName::Mxfp8 => tensorwise
                .with_casts(CastConfig::dynamic_mx().with_format(Format::E4M3))
                .with_gemm_output(GemmConfig::new(false)),
            RecipeName::Direct => tensorwise.emulating(
                CastConfig::unscaled()
                    .with_format(Format::E5M2)
                    .with_overflow(Overflow::NonFinite),
            ),
            RecipeName::Hybrid => {
                tensorwise.emulating(CastConfig::current_tensorwise().with_format(Format::E4M3))
            }
        }
    }

    /// Casts every tensor of every operator: weights, inputs and outputs by `forward`, gradients to E5M2 with stochastic rounding
    /// and without scales, so that values beyond the range become Inf.
    fn emulating(self, forward: CastConfig) -> Self {
        let gradient = CastConfig::unscaled()
            .with_format(Format::E5M2)
            .with_rounding(CastRounding::Stochastic)
            .with_overflow(Overflow::NonFinite);
        self.with_casts(forward)
            .with_output(forward)
            .with_grad_output(gradient)
            .with_grad_input(gradient)
            .with_grad_weight(gradient)
            .with_gemm_output(GemmConfig::new(false))
            .with_cast_operators(true)
    }
}

impl From<DelayedScaling> for Fp8LinearConfig {
    fn from(delayed: DelayedScaling) -> Self {
        Self::from_recipe_name(RecipeName::Delayed).with_delayed(delayed)
    }
}

impl FromStr for RecipeName {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let found = Self::ALL.into_iter().find(|name| name.as_str() == text);
        found.ok_or_else(|| ConfigError::UnknownRecipe {
            got: text.to_string(),
            valid: Self::ALL.map(RecipeName::as_str).join(", "),
        })
    }
}
