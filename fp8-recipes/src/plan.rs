//! From a recipe and a layer's state to the casts of one call.

use crate::autocast::LayerStep;
use crate::config::{Gemm, InitialScale, Operand, ResolvedConfig, ScalingType};
use crate::error::{Error, Result};
use crate::state::Fp8State;
use crate::stats::CastStats;
use fp8_candle::{
    FirstScale, GemmPlan, LinearPlan, Observer, Quantizer, Role, ScalePolicy, ScaleSource,
};
use fp8_core::{Cast, DelayedRule};
use std::sync::Arc;

/// The casts of one call of a layer in `step`. Everything is captured here: the backward pass does not look at the guard.
pub(crate) fn linear_plan(state: &Fp8State, step: &LayerStep) -> Result<LinearPlan> {
    let LayerStep { settings, cells } = step;
    let config = &*settings.config;
    let delayed = config.delayed.as_ref();
    // Evaluation changes nothing, so a scale that no step has made is not 1 but the one that a step would make.
    let one = delayed.is_some_and(|delayed| delayed.initial == InitialScale::One);
    let maker = Maker {
        state,
        config,
        cells,
        training: settings.training,
        rule: delayed.map(|delayed| delayed.rule()).unwrap_or_default(),
        first: match one && settings.training {
            true => FirstScale::One,
            false => FirstScale::OwnAmax,
        },
        stats: settings.stats.as_ref(),
    };
    Ok(LinearPlan::new(state.path())
        .with_output(maker.gemm(Gemm::Output)?)
        .with_grad_input(maker.gemm(Gemm::GradInput)?)
        .with_grad_weight(maker.gemm(Gemm::GradWeight)?)
        .with_emulate(config.emulate))
}

struct Maker<'a> {
    state: &'a Fp8State,
    config: &'a ResolvedConfig,
    cells: &'a Arc<fp8_candle::state::StepCells>,
    training: bool,
    rule: DelayedRule,
    first: FirstScale,
    stats: Option<&'a CastStats>,
}

/// The tensor role whose state the casts of an operand use.
fn role_of(operand: Operand) -> Role {
    match operand {
        Operand::Input | Operand::InputForGradWeight => Role::Input,
        Operand::Weight | Operand::WeightForGradInput => Role::Weight,
        Operand::GradOutput | Operand::GradOutputForGradWeight => Role::GradOutput,
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

    /// None where the operand stays in high precision.
    fn quantizer(&self, operand: Operand) -> Result<Option<Quantizer>> {
        let cast = self.config.cast(operand);
        let role = role_of(operand);
        let slot = self.state.slot(role).ok_or_else(|| Error::NoRole {
            path: self.state.path().to_string(),
            role,
        })?;
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
        };
        let Some(format) = cast.format else {
            return Ok(None);
        };
        let observer = Observer::new(self.cells.clone(), slot.row(), self.training);
        let quantizer = Quantizer::new(Cast::new(format), cast.granularity, source)
            .with_counter(self.state.counter().clone())
            .with_observer(observer);
        Ok(Some(match self.stats {
            Some(stats) => quantizer.with_hook(stats.hook(self.state.shared_path(), operand)),
            None => quantizer,
        }))
    }
}
