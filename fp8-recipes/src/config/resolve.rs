//! Filling in what a configuration leaves open, and checking that the whole makes sense.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use fp8_core::{Format, FormatPair, Granularity, ScaleRounding};

use super::{
    CastConfig, ConfigError, DelayedScaling, Fp8LinearConfig, Gemm, GemmConfig, Operand,
    RecipeName, ScalingType,
};

/// A configuration with nothing left open, found to be consistent. Made by
/// [`Recipe::resolve`](super::Recipe::resolve).
///
/// Prints as torchao prints a layer: `i:dyn_ten_e4m3,w:dyn_ten_e4m3,go:dyn_ten_e5m2`, followed by
/// `i_gw:`, `w_gi:`, `go_gw:` where a second use differs from the first, and `o:`, `gi:`, `gw:` where results are cast. The default is the default
/// recipe, `delayed`.
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
    /// Accepted for compatibility, without effect.
    pub pad_inner_dim: bool,
    /// Whether FP8 GEMMs are emulated in f32.
    pub emulate: bool,
    /// The pair that unset formats were taken from.
    pub format_pair: FormatPair,
    /// The seed of stochastic rounding.
    pub seed: u64,
    /// Whether each cast rounds to f16 first.
    pub via_f16: bool,
    /// Whether the tensors of operators without a GEMM of their own are cast.
    pub cast_operators: bool,
    /// The rule of the delayed casts; `None` when there are none. Its `format` says nothing here:
    /// the casts have their own.
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
        gemm.operands()
            .iter()
            .all(|operand| !self.cast(*operand).is_disabled())
    }

    fn casts(&self) -> impl Iterator<Item = (Operand, &CastConfig)> {
        Gemm::ALL
            .into_iter()
            .flat_map(|gemm| gemm.operands())
            .map(|operand| (operand, self.cast(operand)))
    }

    fn check(&self) -> Result<(), ConfigError> {
        if !(self.amax_epsilon >= 0. && self.amax_epsilon.is_finite()) {
            return Err(ConfigError::AmaxEpsilon {
                got: self.amax_epsilon,
            });
        }
        if let Some(delayed) = &self.delayed {
            delayed.validate()?;
        }
        for (operand, cast) in self.casts() {
            check_cast(operand, cast)?;
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

impl Default for ResolvedConfig {
    fn default() -> Self {
        Fp8LinearConfig::from_recipe_name(RecipeName::Delayed).filled_in()
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
        Ok(())
    }
}

/// Says once in a process, as a configuration is resolved by every guard.
fn warn_of_recomputed_weights() {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !WARNED.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            "force_recompute_fp8_weight_in_bwd has no effect: a weight is cast once per change, and its codes are kept for the \
             backward pass"
        );
    }
}

/// The two uses of each operand.
const USES: [(Operand, Operand); 3] = [
    (Operand::Input, Operand::InputForGradWeight),
    (Operand::Weight, Operand::WeightForGradInput),
    (Operand::GradOutput, Operand::GradOutputForGradWeight),
];

impl Fp8LinearConfig {
    /// Fills in what was left open and checks the whole.
    ///
    /// - An unset second use copies the first.
    /// - An unset format is E4M3 for input and weight, E5M2 for the output's gradient; of a delayed cast, what
    ///   [`DelayedScaling::format`] says. That of a second use is the format of the first.
    /// - [`FormatPair::Fnuz`] turns E4M3 and E5M2 into their FNUZ forms, set or unset.
    /// - Delayed casts follow `delayed`, with power-of-two scales if it or this configuration asks for them.
    ///
    /// # Errors
    /// A [`ConfigError`] that names the value at fault.
    pub fn resolve(&self) -> Result<ResolvedConfig, ConfigError> {
        if self.enable_fp8_all_gather {
            return Err(ConfigError::AllGather);
        }
        if self.force_recompute_fp8_weight_in_bwd {
            warn_of_recomputed_weights();
        }
        let resolved = self.filled_in();
        resolved.check()?;
        Ok(resolved)
    }

    /// Nothing left open, nothing checked.
    fn filled_in(&self) -> ResolvedConfig {
        let pair = self.format_pair;
        let format = self.delayed.format;
        let (forward, backward) = (format.forward(), format.backward());
        let (input, input_for_grad_weight) = fill(
            &self.input,
            self.input_for_grad_weight.as_ref(),
            (Format::E4M3, forward),
            pair,
        );
        let (weight, weight_for_grad_input) = fill(
            &self.weight,
            self.weight_for_grad_input.as_ref(),
            (Format::E4M3, forward),
            pair,
        );
        let (grad_output, grad_output_for_grad_weight) = fill(
            &self.grad_output,
            self.grad_output_for_grad_weight.as_ref(),
            (Format::E5M2, backward),
            pair,
        );
        let result = |cast: &CastConfig, default: Format| {
            cast.with_format(in_pair(cast.format.unwrap_or(default), pair))
        };
        let mut resolved = ResolvedConfig {
            input,
            input_for_grad_weight,
            weight,
            weight_for_grad_input,
            grad_output,
            grad_output_for_grad_weight,
            gemm_output: self.gemm_output,
            gemm_grad_input: self.gemm_grad_input,
            gemm_grad_weight: self.gemm_grad_weight,
            amax_epsilon: self.amax_epsilon,
            round_scales_to_power_of_two: self.round_scales_to_power_of_two,
            pad_inner_dim: self.pad_inner_dim,
            emulate: self.emulate,
            format_pair: pair,
            output: result(&self.output, Format::E4M3),
            grad_input: result(&self.grad_input, Format::E5M2),
            grad_weight: result(&self.grad_weight, Format::E5M2),
            seed: self.seed,
            via_f16: self.via_f16,
            cast_operators: self.cast_operators,
            delayed: None,
        };
        let is_delayed = |cast: &CastConfig| cast.scaling == ScalingType::Delayed;
        if resolved.casts().any(|(_, cast)| is_delayed(cast)) {
            let mut delayed = self.delayed.clone();
            if self.round_scales_to_power_of_two {
                delayed.scale_rounding = ScaleRounding::PowerOfTwo;
            }
            resolved.delayed = Some(delayed);
        }
        resolved
    }
}

impl DelayedScaling {
    /// The casts of this recipe: all delayed and tensorwise, in the formats of the two passes.
    ///
    /// # Errors
    /// As [`DelayedScaling::validate`].
    pub fn resolve(&self) -> Result<ResolvedConfig, ConfigError> {
        Fp8LinearConfig::from(self.clone()).resolve()
    }
}

/// Both uses of an operand with their formats; `defaults`: of casts in general, and of delayed ones.
fn fill(
    first: &CastConfig,
    second: Option<&CastConfig>,
    defaults: (Format, Format),
    pair: FormatPair,
) -> (CastConfig, CastConfig) {
    let used = match (first.is_disabled(), second) {
        (true, Some(second)) => second,
        _ => first,
    };
    let default = match used.scaling {
        ScalingType::Delayed => defaults.1,
        _ => defaults.0,
    };
    let concrete = |cast: &CastConfig, default: Format| {
        cast.with_format(in_pair(cast.format.unwrap_or(default), pair))
    };
    let second = second.unwrap_or(first);
    (
        concrete(first, default),
        concrete(second, first.format.unwrap_or(default)),
    )
}

/// The format of a cast that is not disabled.
fn active_format(cast: &CastConfig) -> Option<Format> {
    if cast.is_disabled() {
        None
    } else {
        cast.format
    }
}

/// The format that stands for `format` in this pair. A format set to FNUZ stays so.
fn in_pair(format: Format, pair: FormatPair) -> Format {
    match pair {
        FormatPair::Ocp => format,
        FormatPair::Fnuz => format.in_pair(pair),
    }
}

/// A result has no state, and its scale is at most one number.
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
    // As in torchao, whose axiswise casts are dynamic; other granularities mean nothing to a disabled cast.
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
