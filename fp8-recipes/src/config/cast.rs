//! How one operand of one GEMM is cast.

use fp8_core::setters;
use fp8_core::{Format, Granularity, Overflow};
use serde::{Deserialize, Serialize};

use super::ScalingType;

/// How a cast rounds. In JSON `nearest_even`, `stochastic`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CastRounding {
    /// To the nearest code, ties to the even one.
    #[default]
    NearestEven,
    /// Up or down at random, so that the mean is the value itself. Each cast takes other random bits, from
    /// [`Fp8LinearConfig::seed`](super::Fp8LinearConfig), whatever the number of threads.
    Stochastic,
}

impl CastRounding {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

fn saturates(overflow: &Overflow) -> bool {
    *overflow == Overflow::Saturate
}

/// How one tensor is cast: an operand of one GEMM, or a result. The default is dynamic, tensorwise, in the operand's
/// default format.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::config::{CastConfig, CastRounding};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let cast = CastConfig::unscaled().with_rounding(CastRounding::Stochastic);
/// assert_eq!(serde_json::to_value(cast)?["rounding"], "stochastic");
/// assert_eq!(CastConfig::unscaled().rounding, CastRounding::NearestEven);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct CastConfig {
    /// Where the scale comes from.
    pub scaling: ScalingType,
    /// Which elements share a scale. In JSON `tensorwise`, `rowwise` (or torchao's `axiswise`),
    /// `{"blockwise": {"rows": 128, "cols": 128}}`, `mx`.
    pub granularity: Granularity,
    /// The format, or `None` for the default of the operand: E4M3 for input and weight, E5M2 for
    /// the output's gradient. In JSON `e4m3`, `e5m2`, `e4m3fnuz`, `e5m2fnuz` or null.
    pub format: Option<Format>,
    /// How values between two codes are rounded.
    #[serde(skip_serializing_if = "CastRounding::is_default")]
    pub rounding: CastRounding,
    /// What values beyond the range become: the largest one (`saturate`), or Inf or NaN (`non_finite`), which a loss scaler
    /// sees in the gradients.
    #[serde(skip_serializing_if = "saturates")]
    pub overflow: Overflow,
}

impl Default for CastConfig {
    fn default() -> Self {
        Self::dynamic_tensorwise()
    }
}

impl CastConfig {
    /// One scale for the tensor, from its own amax.
    pub const fn dynamic_tensorwise() -> Self {
        Self::new(ScalingType::Dynamic, Granularity::Tensorwise)
    }

    /// One scale per index that the GEMM keeps, from the amax along the axis that it sums over
    /// (torchao's axiswise).
    pub const fn dynamic_rowwise() -> Self {
        Self::new(ScalingType::Dynamic, Granularity::Rowwise)
    }

    /// One scale per block of `rows` x `cols` elements, from the amax of the block.
    pub const fn dynamic_blockwise(rows: usize, cols: usize) -> Self {
        Self::new(ScalingType::Dynamic, Granularity::Blockwise { rows, cols })
    }

    /// One power-of-two scale per 32 elements along the axis that the GEMM sums over.
    pub const fn dynamic_mx() -> Self {
        Self::new(ScalingType::Dynamic, Granularity::Mx)
    }

    /// One scale for the tensor, from its own amax by Transformer Engine's rule.
    pub const fn current_tensorwise() -> Self {
        Self::new(ScalingType::Current, Granularity::Tensorwise)
    }

    /// One scale for the tensor, from the amaxes of earlier steps.
    pub const fn delayed_tensorwise() -> Self {
        Self::new(ScalingType::Delayed, Granularity::Tensorwise)
    }

    /// One scale for the tensor, fixed by calibration.
    pub const fn static_tensorwise() -> Self {
        Self::new(ScalingType::Static, Granularity::Tensorwise)
    }

    /// The values themselves, with a quant_scale of 1.
    pub const fn unscaled() -> Self {
        Self::new(ScalingType::Unscaled, Granularity::Tensorwise)
    }

    /// High precision.
    pub const fn disabled() -> Self {
        Self::new(ScalingType::Disabled, Granularity::Tensorwise)
    }

    /// A cast in the default format of its operand.
    pub const fn new(scaling: ScalingType, granularity: Granularity) -> Self {
        Self {
            scaling,
            granularity,
            format: None,
            rounding: CastRounding::NearestEven,
            overflow: Overflow::Saturate,
        }
    }

    /// A copy in this format.
    #[must_use]
    pub const fn with_format(self, format: Format) -> Self {
        Self {
            format: Some(format),
            ..self
        }
    }

    /// Whether the tensor stays in high precision.
    pub const fn is_disabled(&self) -> bool {
        matches!(self.scaling, ScalingType::Disabled)
    }

    /// The short description, as torchao's: `dyn_ten_e4m3`, `dyn_axs_e4m3`, `del_ten_e5m2`,
    /// `dis_ten_e4m3`. An unset format is left out: `dyn_ten`. Stochastic rounding adds `_sr`, overflow to Inf or NaN `_inf`.
    pub fn short(&self) -> String {
        // Blocks and groups of 32 have no abbreviation in torchao.
        let granularity = match self.granularity {
            Granularity::Tensorwise => "ten".to_string(),
            Granularity::Rowwise => "axs".to_string(),
            Granularity::Blockwise { rows, cols } => format!("blk{rows}x{cols}"),
            Granularity::Mx => "mx".to_string(),
        };
        let format = self
            .format
            .map(|format| format!("_{format}"))
            .unwrap_or_default();
        let rounding = match self.rounding {
            CastRounding::NearestEven => "",
            CastRounding::Stochastic => "_sr",
        };
        let overflow = match saturates(&self.overflow) {
            true => "",
            false => "_inf",
        };
        let scaling = self.scaling.short();
        format!("{scaling}_{granularity}{format}{rounding}{overflow}")
    }
}

setters! { const CastConfig:
    with_scaling(scaling: ScalingType);
    with_granularity(granularity: Granularity);
    with_rounding(rounding: CastRounding);
    with_overflow(overflow: Overflow);
}
