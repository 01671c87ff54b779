//! From a recipe and a layer's state to the casts of one call.

use crate::autocast::Context;
use crate::config::{CastConfig, GemmConfig, InitialScale, ResolvedConfig, ScalingType};
use crate::error::{Error, Result};
use crate::state::Fp8State;
use fp8_candle::state::StepCells;
use fp8_candle::{
    FirstScale, GemmPlan, LinearPlan, Observer, Quantizer, Role, ScalePolicy, ScaleSource,
};
use fp8_core::{Cast, DelayedRule};
use std::sync::Arc;

/// The casts of one call of a layer under `context`, which record into `step`. Everything is captured here: the backward pass
/// does not look at the guard.
pub(crate) fn linear_plan(
    state: &Fp8State,
    context: &Context,
    step: &Arc<StepCells>,
) -> Result<LinearPlan> {
    let config = &*context.settings.config;
    let delayed = config.delayed.as_ref();
    // Evaluation changes nothing, so a scale that no step has made is not 1 but the one that a step would make.
    let one = delayed.is_some_and(|delayed| delayed.initial == InitialScale::One);
    let maker = Maker {
        state,
        config,
        step,
        training: context.settings.training,
        rule: delayed.map(|delayed| delayed.rule()).unwrap_or_default(),
        first: match one && context.settings.training {
            true => FirstScale::One,
            false => FirstScale::OwnAmax,
        },
    };
    Ok(LinearPlan {
        path: state.path().into(),
        output: maker.gemm(
            (&config.input, Role::Input),
            (&config.weight, Role::Weight),
            config.gemm_output,
        )?,
        grad_input: maker.gemm(
            (&config.grad_output, Role::GradOutput),
            (&config.weight_for_grad_input, Role::Weight),
            config.gemm_grad_input,
        )?,
        grad_weight: maker.gemm(
            (&config.grad_output_for_grad_weight, Role::GradOutput),
            (&config.input_for_grad_weight, Role::Input),
            config.gemm_grad_weight,
        )?,
        emulate: config.emulate,
    })
}

struct Maker<'a> {
    state: &'a Fp8State,
    config: &'a ResolvedConfig,
    step: &'a Arc<StepCells>,
    training: bool,
    rule: DelayedRule,
    first: FirstScale,
}

impl Maker<'_> {
    fn gemm(
        &self,
        (a, a_role): (&CastConfig, Role),
        (b, b_role): (&CastConfig, Role),
        gemm: GemmConfig,
    ) -> Result<Option<GemmPlan>> {
        let (a, b) = (self.quantizer(a, a_role)?, self.quantizer(b, b_role)?);
        Ok(a.zip(b).map(|(a, b)| GemmPlan {
            a,
            b,
            use_fast_accum: gemm.use_fast_accum,
        }))
    }

    /// None where the operand stays in high precision.
    fn quantizer(&self, cast: &CastConfig, role: Role) -> Result<Option<Quantizer>> {
        let slot = self.state.slot(role).ok_or_else(|| Error::NoRole {
            path: self.state.path().to_string(),
            role: role.name(),
        })?;
        let source = match cast.scaling {
            ScalingType::Disabled => return Ok(None),
            ScalingType::Dynamic => ScaleSource::Current {
                policy: ScalePolicy::dynamic(cast.granularity),
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
        Ok(Some(Quantizer {
            cast: Cast::new(format),
            granularity: cast.granularity,
            source,
            counter: Some(self.state.counter().clone()),
            observer: Some(Observer {
                step: self.step.clone(),
                row: slot.row(),
                record: self.training,
            }),
        }))
    }
}
