//! Filling in the defaults of a configuration.

use std::sync::atomic::{AtomicBool, Ordering};

use fp8_core::{Format, FormatPair, ScaleRounding};

use super::{
    CastConfig, ConfigError, DelayedScaling, Fp8LinearConfig, ResolvedConfig, ScalingType,
};

/// Warns once per process, because every guard resolves its configuration.
fn warn_of_recomputed_weights() {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !WARNED.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            "force_recompute_fp8_weight_in_bwd has no effect: a weight is cast once per change, and its codes are kept for the \
             backward pass"
        );
    }
}

impl Fp8LinearConfig {
    /// Fills in defaults and checks that the casts fit together.
    ///
    /// - An unset second use copies the first.
    /// - An unset format is E4M3 for input and weight, E5M2 for the output's gradient; for a delayed cast it is that of
    ///   [`DelayedScaling::format`]; for a second use, the format of the first.
    /// - [`FormatPair::Fnuz`] turns E4M3 and E5M2 into their FNUZ forms, set or unset.
    /// - Delayed casts follow `delayed`, with power-of-two scales if it or this configuration asks for them.
    ///
    /// # Errors
    /// A [`ConfigError`] that names the value at fault.
    pub fn resolve(&self) -> Result<ResolvedConfig, ConfigError> {
        if self.force_recompute_fp8_weight_in_bwd {
            warn_of_recomputed_weights();
        }
        let resolved = self.filled_in();
        resolved.check()?;
        Ok(resolved)
    }

    /// Fills in defaults and checks nothing.
    fn filled_in(&self) -> ResolvedConfig {
        let pair = self.format_pair;
        let forward = (Format::E4M3, self.delayed.format.forward());
        let backward = (Format::E5M2, self.delayed.format.backward());
        let both = |first: &CastConfig, second: &Option<CastConfig>, defaults| {
            fill(first, second.as_ref(), defaults, pair)
        };
        let (input, input_for_grad_weight) =
            both(&self.input, &self.input_for_grad_weight, forward);
        let (weight, weight_for_grad_input) =
            both(&self.weight, &self.weight_for_grad_input, forward);
        let (grad_output, grad_output_for_grad_weight) = both(
            &self.grad_output,
            &self.grad_output_for_grad_weight,
            backward,
        );
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
            emulate: self.emulate,
            enable_fp8_all_gather: self.enable_fp8_all_gather,
            output: with_default(&self.output, Format::E4M3, pair),
            grad_input: with_default(&self.grad_input, Format::E5M2, pair),
            grad_weight: with_default(&self.grad_weight, Format::E5M2, pair),
            seed: self.seed,
            via_f16: self.via_f16,
            cast_operators: self.cast_operators,
            kept_activations: self.kept_activations,
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

/// Fills in both uses of an operand. `defaults`: the format of a cast without one, and of a delayed cast without one.
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
    (
        with_default(first, default, pair),
        with_default(
            second.unwrap_or(first),
            first.format.unwrap_or(default),
            pair,
        ),
    )
}

/// The cast in its own format or else in `default`, as a format of this pair.
fn with_default(cast: &CastConfig, default: Format, pair: FormatPair) -> CastConfig {
    cast.with_format(in_pair(cast.format.unwrap_or(default), pair))
}

/// The counterpart of `format` in this pair. FNUZ formats do not change.
fn in_pair(format: Format, pair: FormatPair) -> Format {
    match pair {
        FormatPair::Ocp => format,
        FormatPair::Fnuz => format.in_pair(pair),
    }
}
