//! Builds the casts of one call from a recipe and a layer's state.

use super::settings::LayerStep;
use super::state::Fp8State;
use crate::config::{CastRounding, Gemm, InitialScale, Operand, ResolvedConfig, ScalingType};
use crate::error::{LayerError, Result};
use crate::stats::hook;
use fp8_candle::{
    AmaxRecorder, Draw, FirstScale, GemmPlan, LinearPlan, Quantizer, ResultCasts, Role,
    ScalePolicy, ScaleSource, Shards,
};
use fp8_core::{Cast, DelayedRule};

/// The casts of one call of a layer in `step`. The plan holds everything that the backward pass needs, so that does not read the guard.
pub(crate) fn linear_plan(state: &Fp8State, step: &LayerStep) -> Result<LinearPlan> {
    let maker = Maker::new(state, step);
    let config = maker.config;
    // If gradients are cast as tensors, and not only as operands, the gradient of the bias is computed from the cast one.
    let casts_gradients = !config.grad_input.is_disabled() || !config.grad_weight.is_disabled();
    let results = ResultCasts::default()
        .with_output(maker.unless_fused(Operand::Output)?)
        .with_grad_input(maker.quantizer(Operand::GradInput)?)
        .with_grad_weight(maker.quantizer(Operand::GradWeight)?);
    Ok(LinearPlan::new(state.path())
        .with_output(maker.gemm(Gemm::Output)?)
        .with_grad_input(maker.gemm(Gemm::GradInput)?)
        .with_grad_weight(maker.gemm(Gemm::GradWeight)?)
        .with_results(results)
        .with_grad_output_in_high_precision(state.is_output_fused())
        .with_bias_from_cast(casts_gradients)
        .with_emulate(config.emulate)
        .with_fetches_codes(config.enable_fp8_all_gather))
}

/// The casts of a tensor and of its gradient; None keeps either in high precision.
pub(crate) struct TensorCasts {
    pub(super) values: Option<Quantizer>,
    pub(super) gradient: Option<Quantizer>,
}

/// The casts of an operator without a GEMM of its own.
pub(crate) struct OperatorCasts {
    pub(super) input: TensorCasts,
    pub(super) weight: TensorCasts,
    pub(super) output: TensorCasts,
}

/// The casts of an operator in `step`; None if the recipe does not cast operators.
pub(crate) fn operator_casts(state: &Fp8State, step: &LayerStep) -> Result<Option<OperatorCasts>> {
    let maker = Maker::new(state, step);
    if !maker.config.cast_operators {
        return Ok(None);
    }
    Ok(Some(OperatorCasts {
        input: TensorCasts {
            values: maker.quantizer(Operand::Input)?,
            gradient: maker.quantizer(Operand::GradInput)?,
        },
        weight: TensorCasts {
            values: maker.quantizer(Operand::Weight)?,
            gradient: maker.quantizer(Operand::GradWeight)?,
        },
        output: TensorCasts {
            values: maker.unless_fused(Operand::Output)?,
            gradient: maker.unless_fused(Operand::GradOutput)?,
        },
    }))
}

/// Makes the casts of one call.
struct Maker<'a> {
    state: &'a Fp8State,
    step: &'a LayerStep,
    config: &'a ResolvedConfig,
    rule: DelayedRule,
    first: FirstScale,
}

/// The tensor role whose state the casts of an operand use.
fn role_of(operand: Operand) -> Role {
    match operand {
        Operand::Input | Operand::InputForGradWeight => Role::Input,
        Operand::Weight | Operand::WeightForGradInput => Role::Weight,
        Operand::GradOutput
        | Operand::GradOutputForGradWeight
        // Results have no stored scales: the row counts their stochastic roundings.
        | Operand::Output
        | Operand::GradInput
        | Operand::GradWeight => Role::GradOutput,
    }
}

impl<'a> Maker<'a> {
    fn new(state: &'a Fp8State, step: &'a LayerStep) -> Self {
        let config = &*step.settings.config;
        let delayed = config.delayed.as_ref();
        // An evaluation before the first step takes the scale that a step would compute, as it cannot update one afterwards.
        let one = delayed.is_some_and(|delayed| delayed.initial == InitialScale::One);
        Self {
            state,
            step,
            config,
            rule: delayed.map(|delayed| delayed.rule()).unwrap_or_default(),
            first: match one && step.settings.training {
                true => FirstScale::One,
                false => FirstScale::OwnAmax,
            },
        }
    }

    fn gemm(&self, gemm: Gemm) -> Result<Option<GemmPlan>> {
        let [a, b] = gemm.operands();
        let (a, b) = (self.quantizer(a)?, self.quantizer(b)?);
        let fast = self.config.gemm(gemm).use_fast_accum;
        Ok(a.zip(b)
            .map(|(a, b)| GemmPlan::new(a, b).with_fast_accum(fast)))
    }

    /// None if the tensor stays in high precision, as the output does where the next operator is fused with this one.
    fn unless_fused(&self, operand: Operand) -> Result<Option<Quantizer>> {
        match self.state.is_output_fused() {
            true => Ok(None),
            false => self.quantizer(operand),
        }
    }

    /// None if the tensor stays in high precision.
    fn quantizer(&self, operand: Operand) -> Result<Option<Quantizer>> {
        let (cast, settings) = (self.config.cast(operand), &self.step.settings);
        let slot_of = |role| {
            self.state.slot(role).ok_or_else(|| LayerError::NoRole {
                path: self.state.path().to_string(),
                role,
            })
        };
        let Some(format) = cast.format.filter(|_| !cast.is_disabled()) else {
            return Ok(None);
        };
        let is_result = Operand::RESULTS.contains(&operand);
        if is_result && self.state.is_in_parts() {
            // Ranks add up results, or have parts of them, which would be rounded with scales of their own.
            return Err(LayerError::ResultInParts {
                path: self.state.path().to_string(),
                operand,
            }
            .into());
        }
        // Operators have only the row of their output gradient.
        let kept = matches!(cast.scaling, ScalingType::Delayed | ScalingType::Static);
        let role = role_of(operand);
        let slot = match self.state.slot(role) {
            None if !kept => slot_of(Role::GradOutput)?,
            _ => slot_of(role)?,
        };
        let source = match cast.scaling {
            ScalingType::Disabled => return Ok(None),
            ScalingType::Dynamic => ScaleSource::Current {
                policy: ScalePolicy::dynamic(cast.granularity),
                power_of_two: self.config.round_scales_to_power_of_two,
            },
            ScalingType::Current => ScaleSource::Current {
                policy: ScalePolicy::Current {
                    eps: self.config.amax_epsilon,
                },
                power_of_two: self.config.round_scales_to_power_of_two,
            },
            ScalingType::Delayed => ScaleSource::Delayed {
                slot: slot.clone(),
                rule: self.rule.clone(),
                first: self.first,
            },
            ScalingType::Static => ScaleSource::Static(slot.clone()),
            ScalingType::Unscaled => ScaleSource::Unscaled,
        };
        let own_row = !is_result && self.state.slot(role).is_some();
        let recorder = AmaxRecorder::new(self.step.cells.clone(), slot.row(), settings.training)
            .with_watched_amax(own_row);
        // From calibration until training goes on, a row has the scale of the file that the model is exported to. Evaluation computes what
        // that file will: served layers divide by its scales, training multiplies.
        let as_served = matches!(cast.scaling, ScalingType::Delayed)
            && !settings.training
            && slot.is_calibrated();
        let rounded = Cast::new(format)
            .with_overflow(cast.overflow)
            .with_via_f16(self.config.via_f16)
            .with_division(as_served);
        let quantizer = Quantizer::new(rounded, cast.granularity, source)
            .with_counter(self.state.counter(operand).clone())
            .with_recorder(recorder)
            .with_replay(self.step.replay(operand))
            .with_shards(match is_result {
                true => Shards::default(),
                false => self.state.shards(role),
            })
            .with_hook(hook(
                self.state.shared_path(),
                operand,
                settings.stats.as_ref(),
                settings.observer.as_ref(),
            ));
        Ok(Some(match cast.rounding {
            CastRounding::NearestEven => quantizer,
            CastRounding::Stochastic => {
                let counter = slot_of(Role::GradOutput)?.clone();
                let draw = match operand {
                    Operand::Weight | Operand::WeightForGradInput => Draw::OfValues,
                    _ if settings.training => Draw::Next {
                        micro_batch: settings.micro_batch,
                    },
                    _ => Draw::Evaluation(operand as u32),
                };
                quantizer
                    .with_stochastic(counter, self.config.seed)
                    .with_draw(draw)
            }
        }))
    }
}
