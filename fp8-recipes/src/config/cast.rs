//! How one operand of one GEMM is cast.

use std::fmt;
use std::str::FromStr;

use fp8_core::{Format, Granularity, Overflow, ParseNameError};
use serde::{Deserialize, Serialize};

use super::ConfigError;
use super::text;

/// Where the scale of a cast comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ScalingType {
    /// From the amax of the tensor itself, at each cast, as torchao does it: `MAX / max(amax, 1e-12)`.
    #[default]
    Dynamic,
    /// From the amax of the tensor itself, at each cast, as Transformer Engine's current scaling does it: `MAX / amax`, where
    /// an amax below [`Fp8LinearConfig::amax_epsilon`](super::Fp8LinearConfig) counts as that, and 1 where the amax is 0,
    /// infinite or NaN.
    Current,
    /// From the amaxes of earlier steps; see [`DelayedScaling`](super::DelayedScaling).
    Delayed,
    /// Fixed beforehand, by calibration.
    Static,
    /// None: the values themselves are cast, with a quant_scale of 1.
    Unscaled,
    /// No cast: the operand stays in high precision.
    Disabled,
}

impl ScalingType {
    /// Whether the scale comes from the tensor that is cast, with no state.
    ///
    /// ```
    /// # use fp8_recipes as fp8;
    /// use fp8::config::ScalingType;
    /// assert!(ScalingType::Current.is_from_tensor() && !ScalingType::Unscaled.is_from_tensor());
    /// ```
    pub const fn is_from_tensor(self) -> bool {
        matches!(self, ScalingType::Dynamic | ScalingType::Current)
    }

    /// The first three letters, as torchao abbreviates: `dyn`, `cur`, `del`, `sta`, `uns`, `dis`.
    pub fn short(self) -> &'static str {
        match self {
            ScalingType::Dynamic => "dyn",
            ScalingType::Current => "cur",
            ScalingType::Delayed => "del",
            ScalingType::Static => "sta",
            ScalingType::Unscaled => "uns",
            ScalingType::Disabled => "dis",
        }
    }
}

impl fmt::Display for ScalingType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ScalingType::Dynamic => "dynamic",
            ScalingType::Current => "current",
            ScalingType::Delayed => "delayed",
            ScalingType::Static => "static",
            ScalingType::Unscaled => "unscaled",
            ScalingType::Disabled => "disabled",
        })
    }
}

impl FromStr for ScalingType {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        match text {
            "dynamic" => Ok(ScalingType::Dynamic),
            "current" => Ok(ScalingType::Current),
            "delayed" => Ok(ScalingType::Delayed),
            "static" => Ok(ScalingType::Static),
            "unscaled" => Ok(ScalingType::Unscaled),
            "disabled" => Ok(ScalingType::Disabled),
            _ => Err(ConfigError::UnknownName(ParseNameError {
                what: "scaling",
                name: text.to_string(),
                expected: "dynamic, current, delayed, static, unscaled or disabled",
            })),
        }
    }
}

/// How a cast rounds. In JSON `nearest_even`, `stochastic`.
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CastRounding {
    /// To the nearest code, ties to the even one.
    #[default]
    NearestEven,
    /// Up or down at random, so that the mean is the value itself: with other bits at each cast, from
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

/// How one tensor is cast: an operand for one GEMM, or a result. The default is dynamic, tensorwise, in the operand's
/// default format.
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
    ///
    /// ```
    /// # use fp8_recipes as fp8;
    /// use fp8::config::{CastConfig, ScalingType};
    /// assert_eq!(CastConfig::unscaled().scaling, ScalingType::Unscaled);
    /// assert!(!CastConfig::unscaled().is_disabled());
    /// ```
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

    /// The same with another scaling.
    pub const fn with_scaling(self, scaling: ScalingType) -> Self {
        Self { scaling, ..self }
    }

    /// The same with another granularity.
    pub const fn with_granularity(self, granularity: Granularity) -> Self {
        Self {
            granularity,
            ..self
        }
    }

    /// The same in this format.
    pub const fn with_format(self, format: Format) -> Self {
        Self {
            format: Some(format),
            ..self
        }
    }

    /// The same with this rounding.
    pub const fn with_rounding(self, rounding: CastRounding) -> Self {
        Self { rounding, ..self }
    }

    /// The same with this treatment of values beyond the range.
    pub const fn with_overflow(self, overflow: Overflow) -> Self {
        Self { overflow, ..self }
    }

    /// Whether the tensor stays in high precision.
    pub const fn is_disabled(&self) -> bool {
        matches!(self.scaling, ScalingType::Disabled)
    }

    /// The short description, as torchao's: `dyn_ten_e4m3`, `dyn_axs_e4m3`, `del_ten_e5m2`,
    /// `dis_ten_e4m3`. An unset format is left out: `dyn_ten`. Stochastic rounding adds `_sr`, overflow to Inf or NaN `_inf`.
    pub fn short(&self) -> String {
        let granularity = text::granularity_short(self.granularity);
        let format = self
            .format
            .map(|format| format!("_{format}"))
            .unwrap_or_default();
        let rounding = match self.rounding {
            CastRounding::NearestEven => "",
            CastRounding::Stochastic => "_sr",
        };
        let overflow = if saturates(&self.overflow) {
            ""
        } else {
            "_inf"
        };
        let scaling = self.scaling.short();
        format!("{scaling}_{granularity}{format}{rounding}{overflow}")
    }
}

/// One of the casts of a layer: an operand in one of the two GEMMs that use it, or what a GEMM gives.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::RecipeName;
/// use fp8::config::{Operand, Recipe};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config = Recipe::from(RecipeName::Hybrid).resolve()?;
/// assert_eq!(config.cast(Operand::Input).scaling.short(), "cur");
/// assert_eq!(config.cast(Operand::GradOutput).scaling.short(), "uns");
/// assert_eq!(Operand::GradInput.to_string(), "grad_input");
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Operand {
    /// x in `output = x w^T`.
    Input,
    /// x in `grad_weight = grad_output^T x`.
    InputForGradWeight,
    /// w in `output = x w^T`.
    Weight,
    /// w in `grad_input = grad_output w`.
    WeightForGradInput,
    /// grad_output in `grad_input = grad_output w`.
    GradOutput,
    /// grad_output in `grad_weight = grad_output^T x`.
    GradOutputForGradWeight,
    /// The output, with its bias.
    Output,
    /// The gradient of the input.
    GradInput,
    /// The gradient of the weight.
    GradWeight,
}

impl Operand {
    pub(crate) const COUNT: usize = 9;

    /// The operands of the GEMMs.
    pub const OF_GEMMS: [Operand; 6] = [
        Operand::Input,
        Operand::InputForGradWeight,
        Operand::Weight,
        Operand::WeightForGradInput,
        Operand::GradOutput,
        Operand::GradOutputForGradWeight,
    ];

    /// The results, which are cast only where a recipe says so.
    pub const RESULTS: [Operand; 3] = [Operand::Output, Operand::GradInput, Operand::GradWeight];

    /// The name of its field in [`Fp8LinearConfig`](super::Fp8LinearConfig).
    pub fn name(self) -> &'static str {
        match self {
            Operand::Input => "input",
            Operand::InputForGradWeight => "input_for_grad_weight",
            Operand::Weight => "weight",
            Operand::WeightForGradInput => "weight_for_grad_input",
            Operand::GradOutput => "grad_output",
            Operand::GradOutputForGradWeight => "grad_output_for_grad_weight",
            Operand::Output => "output",
            Operand::GradInput => "grad_input",
            Operand::GradWeight => "grad_weight",
        }
    }
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One of the three GEMMs of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gemm {
    /// `output = x w^T`.
    Output,
    /// `grad_input = grad_output w`.
    GradInput,
    /// `grad_weight = grad_output^T x`.
    GradWeight,
}

impl Gemm {
    /// All three.
    pub const ALL: [Gemm; 3] = [Gemm::Output, Gemm::GradInput, Gemm::GradWeight];

    /// Its two operands, in the order of the formula.
    pub fn operands(self) -> [Operand; 2] {
        match self {
            Gemm::Output => [Operand::Input, Operand::Weight],
            Gemm::GradInput => [Operand::GradOutput, Operand::WeightForGradInput],
            Gemm::GradWeight => [
                Operand::GradOutputForGradWeight,
                Operand::InputForGradWeight,
            ],
        }
    }
}

impl fmt::Display for Gemm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Gemm::Output => "output",
            Gemm::GradInput => "grad_input",
            Gemm::GradWeight => "grad_weight",
        })
    }
}
