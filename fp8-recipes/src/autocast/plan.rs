//! Builds the casts of one call from a recipe and a layer's state.

use super::layer_step::LayerStep;
use super::state::Fp8State;
use crate::config::{CastRounding, Gemm, InitialScale, Operand, ResolvedConfig, ScalingType};
use crate::error::{LayerError, Result};
use crate::stats::{CastObserver, CastStats, hook};
use fp8_candle::{
    AmaxRecorder, Draw, FirstScale, GemmPlan, LinearPlan, Quantizer, ResultCasts, Role,
    ScalePolicy, ScaleSource,
};
use fp8_core::{Cast, DelayedRule};
use std::sync::Arc;

/// The casts of one call of a layer in `step`. The plan holds all that the backward pass needs, which does not read the guard.
pub(crate) fn linear_plan(state: &Fp8State, step: &LayerStep) -> Result<LinearPlan> {
    let LayerStep {
        settings, cells, ..
    } = step;
    let config = &*settings.config;
    let delayed = config.delayed.as_ref();
    // An evaluation before the first step takes the scale that a step would compute, as it cannot update one afterwards.
    let one = delayed.is_some_and(|delayed| delayed.initial == InitialScale::One);
    let maker = Maker {
        state,
        step,
        config,
        cells,
        training: settings.training,
        rule: delayed.map(|delayed| delayed.rule()).unwrap_or_default(),
        first: match one && settings.training {
            true => FirstScale::One,
            false => FirstScale::OwnAmax,
        },
        stats: settings.stats.as_ref(),
        hook: settings.hook.as_ref(),
    };
    let fused = state.is_output_fused();
    // If gradients are cast as tensors, and not only as operands, the gradient of the bias is computed from the cast one.
    let of_tensors = !config.grad_input.is_disabled() || !config.grad_weight.is_disabled();
    Ok(LinearPlan::new(state.path())
        .with_output(maker.gemm(Gemm::Output)?)
        .with_grad_input(maker.gemm(Gemm::GradInput)?)
        .with_grad_weight(maker.gemm(Gemm::GradWeight)?)
        .with_results(maker.results()?)
        .with_grad_output_in_high_precision(fused)
        .with_bias_from_cast(of_tensors)
        .with_emulate(config.emulate))
}

/// The casts of an operator without a GEMM of its own; None keeps a tensor in high precision.
pub(crate) struct OperatorCasts {
    pub(crate) input: Option<Quantizer>,
    pub(crate) weight: Option<Quantizer>,
    pub(crate) output: Option<Quantizer>,
    pub(crate) grad_output: Option<Quantizer>,
    pub(crate) grad_input: Option<Quantizer>,
    pub(crate) grad_weight: Option<Quantizer>,
}

/// The casts of an operator in `step`; None if the recipe does not cast operators.
pub(crate) fn operator_casts(state: &Fp8State, step: &LayerStep) -> Result<Option<OperatorCasts>> {
    let LayerStep {
        settings, cells, ..
    } = step;
    let config = &*settings.config;
    if !config.cast_operators {
        return Ok(None);
    }
    let maker = Maker {
        state,
        step,
        config,
        cells,
        training: settings.training,
        rule: DelayedRule::default(),
        first: FirstScale::OwnAmax,
        stats: settings.stats.as_ref(),
        hook: settings.hook.as_ref(),
    };
    let fused = state.is_output_fused();
    let unless_fused = |operand: Operand| match fused {
        true => Ok(None),
        false => maker.quantizer(operand),
    };
    Ok(Some(OperatorCasts {
        input: maker.quantizer(Operand::Input)?,
        weight: maker.quantizer(Operand::Weight)?,
        output: unless_fused(Operand::Output)?,
        grad_output: unless_fused(Operand::GradOutput)?,
        grad_input: maker.quantizer(Operand::GradInput)?,
        grad_weight: maker.quantizer(Operand::GradWeight)?,
    }))
}

struct Maker<'a> {
    state: &'a Fp8State,
    step: &'a LayerStep,
    config: &'a ResolvedConfig,
    cells: &'a Arc<fp8_candle::state::StepCells>,
    training: bool,
    rule: DelayedRule,
    first: FirstScale,
    stats: Option<&'a CastStats>,
    hook: Option<&'a CastObserver>,
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

impl Maker<'_> {
    fn gemm(&self, gemm: Gemm) -> Result<Option<GemmPlan>> {
        let [a, b] = gemm.operands();
        let (a, b) = (self.quantizer(a)?, self.quantizer(b)?);
        let fast = self.config.gemm(gemm).use_fast_accum;
        Ok(a.zip(b)
            .map(|(a, b)| GemmPlan::new(a, b).with_fast_accum(fast)))
    }

    fn results(&self) -> Result<ResultCasts> {
        let output = match self.state.is_output_fused() {
            true => None,
            false => self.quantizer(Operand::Output)?,
        };
        Ok(ResultCasts::default()
            .with_output(output)
            .with_grad_input(self.quantizer(Operand::GradInput)?)
            .with_grad_weight(self.quantizer(Operand::GradWeight)?))
    }

    /// None if the tensor stays in high precision.
    fn quantizer(&self, operand: Operand) -> Result<Option<Quantizer>> {
        let cast = self.config.cast(operand);
        let slot_of = |role| {
            self.state.slot(role).ok_or_else(|| LayerError::NoRole {
                path: self.state.path().to_string(),
                role,
            })
        };
        if cast.is_disabled() {
            return Ok(None);
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
        let Some(format) = cast.format else {
            return Ok(None);
        };
        let own_row = !Operand::RESULTS.contains(&operand) && self.state.slot(role).is_some();
        let recorder = AmaxRecorder::new(self.cells.clone(), slot.row(), self.training)
            .with_watched_amax(own_row);
        let rounded = Cast::new(format)
            .with_overflow(cast.overflow)
            .with_via_f16(self.config.via_f16);
        let quantizer = Quantizer::new(rounded, cast.granularity, source)
            .with_counter(self.state.counter(operand).clone())
            .with_recorder(recorder)
            .with_replay(self.step.replay(operand))
            .with_hook(hook(
                self.state.shared_path(),
                operand,
                self.stats,
                self.hook,
            ));
        Ok(Some(match cast.rounding {
            CastRounding::NearestEven => quantizer,
            CastRounding::Stochastic => {
                let counter = slot_of(Role::GradOutput)?.clone();
                let draw = match operand {
                    Operand::Weight | Operand::WeightForGradInput => Draw::OfValues,
                    _ if self.training => Draw::Next,
                    _ => Draw::Evaluation(operand as u32),
                };
                quantizer
                    .with_stochastic(counter, self.config.seed)
                    .with_draw(draw)
            }
        }))
    }
}
