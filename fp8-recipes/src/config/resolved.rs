//! A configuration with every default filled in, and the rules that its casts obey.

use std::fmt;

use fp8_candle::ops::AttentionProducts;
use fp8_core::{Format, Granularity};

use super::{
    CastConfig, CastRounding, ConfigError, DelayedScaling, Gemm, GemmConfig, KeptActivations,
    Operand, ScalingType,
};

/// The two uses of each operand.
const USES: [(Operand, Operand); 3] = [
    (Operand::Input, Operand::InputForGradWeight),
    (Operand::Weight, Operand::WeightForGradInput),
    (Operand::GradOutput, Operand::GradOutputForGradWeight),
];

/// A configuration with every default filled in and checked for consistency: the result of
/// [`Recipe::resolve`](super::Recipe::resolve).
///
/// Prints as torchao prints a layer: `i:dyn_ten_e4m3,w:dyn_ten_e4m3,go:dyn_ten_e5m2`, followed by `i_gw:`, `w_gi:`, `go_gw:` where
/// a second use differs from the first, by `o:`, `gi:`, `gw:` where results are cast, by `a:` and what [`AttentionProducts`] prints
/// where attention has products in FP8, and by `kept:fp8:128` where activations are kept in FP8.
///
/// The format of every cast is set; it has no meaning where the cast is disabled.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ResolvedConfig {
    /// Cast of x in `output = x w^T`.
    pub input: CastConfig,
    /// Cast of x in `grad_weight = grad_output^T x`.
    pub input_for_grad_weight: CastConfig,
    /// Cast of w in `output = x w^T`.
    pub weight: CastConfig,
    /// Cast of w in `grad_input = grad_output w`.
    pub weight_for_grad_input: CastConfig,
    /// Cast of grad_output in `grad_input = grad_output w`.
    pub grad_output: CastConfig,
    /// Cast of grad_output in `grad_weight = grad_output^T x`.
    pub grad_output_for_grad_weight: CastConfig,
    /// Cast of the output.
    pub output: CastConfig,
    /// Cast of the gradient of x.
    pub grad_input: CastConfig,
    /// Cast of the gradient of w.
    pub grad_weight: CastConfig,
    /// How `output` is computed.
    pub gemm_output: GemmConfig,
    /// How `grad_input` is computed.
    pub gemm_grad_input: GemmConfig,
    /// How `grad_weight` is computed.
    pub gemm_grad_weight: GemmConfig,
    /// The least amax of casts with current scales.
    pub amax_epsilon: f32,
    /// Whether every `quant_scale` is rounded down to a power of two.
    pub round_scales_to_power_of_two: bool,
    /// Whether FP8 GEMMs are emulated in f32.
    pub emulate: bool,
    /// Whether weights in parts on several ranks travel as FP8 codes.
    pub enable_fp8_all_gather: bool,
    /// The seed of stochastic rounding.
    pub seed: u64,
    /// Whether each cast rounds to f16 first.
    pub via_f16: bool,
    /// Whether the tensors of operators without a GEMM of their own are cast.
    pub cast_operators: bool,
    /// The products of attention in FP8.
    pub attention: AttentionProducts,
    /// How transformer modules keep what their backward pass reads besides the codes of operands.
    pub kept_activations: KeptActivations,
    /// The rule of the delayed casts; `None` without delayed casts. Its `format` has no meaning here: each cast has its own.
    pub delayed: Option<DelayedScaling>,
}

impl ResolvedConfig {
    /// The cast of an operand in one of its two uses, or of a result.
    pub fn cast(&self, operand: Operand) -> &CastConfig {
        match operand {
            Operand::Input => &self.input,
            Operand::InputForGradWeight => &self.input_for_grad_weight,
            Operand::Weight => &self.weight,
            Operand::WeightForGradInput => &self.weight_for_grad_input,
            Operand::GradOutput => &self.grad_output,
            Operand::GradOutputForGradWeight => &self.grad_output_for_grad_weight,
            Operand::Output => &self.output,
            Operand::GradInput => &self.grad_input,
            Operand::GradWeight => &self.grad_weight,
        }
    }

    /// How a GEMM is computed.
    pub fn gemm(&self, gemm: Gemm) -> GemmConfig {
        match gemm {
            Gemm::Output => self.gemm_output,
            Gemm::GradInput => self.gemm_grad_input,
            Gemm::GradWeight => self.gemm_grad_weight,
        }
    }

    /// Whether a GEMM multiplies FP8 operands. Both of its operands are cast, or neither.
    pub fn is_fp8(&self, gemm: Gemm) -> bool {
        let mut operands = gemm.operands().into_iter();
        operands.all(|operand| !self.cast(operand).is_disabled())
    }

    pub(super) fn casts(&self) -> impl Iterator<Item = (Operand, &CastConfig)> {
        Gemm::ALL
            .into_iter()
            .flat_map(|gemm| gemm.operands())
            .map(|operand| (operand, self.cast(operand)))
    }

    /// The cast of a weight that travels as codes with a delayed scale: a scale that the ranks have to share, since each of them decodes the
    /// codes of all.
    pub(crate) fn shared_delayed_cast(&self) -> Option<Operand> {
        let travels = |operand: &Operand| {
            let cast = self.cast(*operand);
            cast.scaling == ScalingType::Delayed && cast.rounding == CastRounding::NearestEven
        };
        let mut weights = [Operand::Weight, Operand::WeightForGradInput].into_iter();
        weights.find(|operand| self.enable_fp8_all_gather && travels(operand))
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        if !(self.amax_epsilon >= 0. && self.amax_epsilon.is_finite()) {
            return Err(ConfigError::AmaxEpsilon {
                got: self.amax_epsilon,
            });
        }
        self.kept_activations.check()?;
        if let Some(delayed) = &self.delayed {
            delayed.validate()?;
        }
        for (operand, cast) in self.casts() {
            check_cast(operand, cast)?;
        }
        let reduces = (self.delayed.as_ref()).is_none_or(|delayed| delayed.reduce_amax);
        if let (false, Some(operand)) = (reduces, self.shared_delayed_cast()) {
            return Err(ConfigError::UnreducedCodes { operand });
        }
        for operand in Operand::RESULTS {
            check_result(operand, self.cast(operand))?;
        }
        let kept = (self.casts())
            .find(|(_, cast)| matches!(cast.scaling, ScalingType::Delayed | ScalingType::Static));
        if let (true, Some((operand, cast))) = (self.cast_operators, kept) {
            let scaling = cast.scaling;
            return Err(ConfigError::OperatorScaling { operand, scaling });
        }
        for gemm in Gemm::ALL {
            self.check_gemm(gemm)?;
        }
        for (first_use, second_use) in USES {
            let (first, second) = (self.cast(first_use), self.cast(second_use));
            if let (Some(first), Some(second)) = (active_format(first), active_format(second))
                && first != second
            {
                return Err(ConfigError::TwoFormats {
                    first_use,
                    first,
                    second_use,
                    second,
                });
            }
        }
        Ok(())
    }

    fn check_gemm(&self, gemm: Gemm) -> Result<(), ConfigError> {
        let [a, b] = gemm.operands();
        let (cast_a, cast_b) = (self.cast(a), self.cast(b));
        match (active_format(cast_a), active_format(cast_b)) {
            (None, Some(_)) => Err(ConfigError::HalfDisabled {
                gemm,
                disabled: a,
                enabled: b,
            }),
            (Some(_), None) => Err(ConfigError::HalfDisabled {
                gemm,
                disabled: b,
                enabled: a,
            }),
            (Some(a), Some(b)) if a.pair() != b.pair() => {
                Err(ConfigError::MixedFormatPairs { gemm, a, b })
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for ResolvedConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (i, w, go) = (&self.input, &self.weight, &self.grad_output);
        write!(f, "i:{},w:{},go:{}", i.short(), w.short(), go.short())?;
        let second_uses = [
            ("i_gw", i, &self.input_for_grad_weight),
            ("w_gi", w, &self.weight_for_grad_input),
            ("go_gw", go, &self.grad_output_for_grad_weight),
        ];
        for (name, first, second) in second_uses {
            if second.short() != first.short() {
                write!(f, ",{name}:{}", second.short())?;
            }
        }
        let results = [
            ("o", &self.output),
            ("gi", &self.grad_input),
            ("gw", &self.grad_weight),
        ];
        for (name, cast) in results.iter().filter(|(_, cast)| !cast.is_disabled()) {
            write!(f, ",{name}:{}", cast.short())?;
        }
        if self.attention.any() {
            write!(f, ",a:{}", self.attention)?;
        }
        if self.kept_activations != KeptActivations::HighPrecision {
            write!(f, ",kept:{}", self.kept_activations)?;
        }
        Ok(())
    }
}

/// The format of a cast that is not disabled.
fn active_format(cast: &CastConfig) -> Option<Format> {
    if cast.is_disabled() {
        None
    } else {
        cast.format
    }
}

/// The cast of a result has no state and at most one scale.
fn check_result(operand: Operand, cast: &CastConfig) -> Result<(), ConfigError> {
    let CastConfig {
        scaling,
        granularity,
        ..
    } = *cast;
    let from_nothing = scaling.is_from_tensor() || scaling == ScalingType::Unscaled;
    match cast.is_disabled() || from_nothing && granularity == Granularity::Tensorwise {
        true => Ok(()),
        false => Err(ConfigError::ResultCast {
            operand,
            granularity,
            scaling,
        }),
    }
}

fn check_cast(operand: Operand, cast: &CastConfig) -> Result<(), ConfigError> {
    let CastConfig {
        scaling,
        granularity,
        ..
    } = *cast;
    // As in torchao, where axiswise casts have to be dynamic. Other granularities are ignored in a disabled cast.
    if cast.is_disabled() && granularity != Granularity::Rowwise {
        return Ok(());
    }
    let own_rule = granularity == Granularity::Mx && scaling == ScalingType::Current;
    if granularity != Granularity::Tensorwise && !scaling.is_from_tensor() || own_rule {
        return Err(ConfigError::NotDynamic {
            operand,
            granularity,
            scaling,
        });
    }
    match granularity {
        Granularity::Blockwise { rows, cols } if rows == 0 || cols == 0 => {
            Err(ConfigError::EmptyBlock {
                operand,
                rows,
                cols,
            })
        }
        _ => Ok(()),
    }
}
