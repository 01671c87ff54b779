//! The tensors and GEMMs of a linear layer, and where the scale of a cast comes from.

use std::str::FromStr;

use fp8_core::ParseNameError;
use serde::{Deserialize, Serialize};

/// Where the scale of a cast comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ScalingType {
    /// From the amax of the tensor itself, at each cast, as torchao does it: `MAX / max(amax, 1e-12)`.
    #[default]
    Dynamic,
    /// From the amax of the tensor itself, at each cast, as Transformer Engine's current scaling does it: `MAX / amax`. An amax
    /// below [`Fp8LinearConfig::amax_epsilon`](super::Fp8LinearConfig) is raised to it. The scale is 1 where the amax is 0,
    /// infinite or NaN.
    Current,
    /// From the amaxes of earlier steps; see [`DelayedScaling`](super::DelayedScaling).
    Delayed,
    /// Fixed beforehand, by calibration.
    Static,
    /// No scale: the values themselves are cast, with a quant_scale of 1.
    Unscaled,
    /// No cast: the operand stays in high precision.
    Disabled,
}

impl ScalingType {
    /// Whether the scale comes from the tensor that is cast, without any state.
    pub const fn is_from_tensor(self) -> bool {
        matches!(self, ScalingType::Dynamic | ScalingType::Current)
    }

    /// The first three letters, as torchao abbreviates: `dyn`, `cur`, `del`, `sta`, `uns`, `dis`.
    pub fn short(self) -> &'static str {
        &self.name()[..3]
    }
}

names! { ScalingType::name, ALL:
    Dynamic = "dynamic",
    Current = "current",
    Delayed = "delayed",
    Static = "static",
    Unscaled = "unscaled",
    Disabled = "disabled",
}

impl FromStr for ScalingType {
    type Err = ParseNameError;

    fn from_str(text: &str) -> Result<Self, ParseNameError> {
        let found = Self::ALL.into_iter().find(|scaling| scaling.name() == text);
        found.ok_or_else(|| ParseNameError {
            what: "scaling",
            name: text.to_string(),
            expected: "dynamic, current, delayed, static, unscaled or disabled",
        })
    }
}

/// One of the casts of a layer: an operand in one of the two GEMMs that use it, or the result of a GEMM.
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
}

names! { pub Operand::name:
    Input = "input",
    InputForGradWeight = "input_for_grad_weight",
    Weight = "weight",
    WeightForGradInput = "weight_for_grad_input",
    GradOutput = "grad_output",
    GradOutputForGradWeight = "grad_output_for_grad_weight",
    Output = "output",
    GradInput = "grad_input",
    GradWeight = "grad_weight",
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

names! { Gemm::name: Output = "output", GradInput = "grad_input", GradWeight = "grad_weight" }
