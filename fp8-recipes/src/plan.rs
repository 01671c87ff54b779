//! From a recipe and a layer's state to the casts of one call.

use crate::autocast::Context;
use crate::config::{
    CastConfig, DelayedScaling, GemmConfig, InitialScale, ResolvedConfig, ScalingType,
};
use crate::state::Fp8State;
use fp8_candle::{DelayedSlot, GemmPlan, LinearPlan, Quantizer, ScalePolicy, ScaleSource};
use fp8_core::{Cast, DelayedRule, Granularity};
use std::sync::Arc;

/// The casts of one call of a layer under `context`. Everything is captured here: the backward pass does not look at
/// the guard.
pub(crate) fn linear_plan(state: &Arc<Fp8State>, context: &Context) -> LinearPlan {
    let config = &*context.config;
    let first_batch = config
        .delayed
        .as_ref()
        .filter(|delayed| delayed.initial == InitialScale::FirstBatch)
        .map(DelayedScaling::rule);
    let maker = Maker {
        state,
        config,
        training: context.training,
        first_batch,
    };
    LinearPlan {
        path: state.path().into(),
        output: maker.gemm(
            (&config.input, state.input()),
            (&config.weight, state.weight()),
            config.gemm_output,
        ),
        grad_input: maker.gemm(
            (&config.grad_output, state.grad_output()),
            (&config.weight_for_grad_input, state.weight()),
            config.gemm_grad_input,
        ),
        grad_weight: maker.gemm(
            (&config.grad_output_for_grad_weight, state.grad_output()),
            (&config.input_for_grad_weight, state.input()),
            config.gemm_grad_weight,
        ),
        emulate: config.emulate,
    }
}

struct Maker<'a> {
    state: &'a Arc<Fp8State>,
    config: &'a ResolvedConfig,
    training: bool,
    first_batch: Option<DelayedRule>,
}

impl Maker<'_> {
    fn gemm(
        &self,
        (a, a_slot): (&CastConfig, &Arc<DelayedSlot>),
        (b, b_slot): (&CastConfig, &Arc<DelayedSlot>),
        gemm: GemmConfig,
    ) -> Option<GemmPlan> {
        Some(GemmPlan {
            a: self.quantizer(a, a_slot)?,
            b: self.quantizer(b, b_slot)?,
            use_fast_accum: gemm.use_fast_accum,
        })
    }

    /// None where the operand stays in high precision.
    fn quantizer(&self, cast: &CastConfig, slot: &Arc<DelayedSlot>) -> Option<Quantizer> {
        let source = match cast.scaling {
            ScalingType::Disabled => return None,
            ScalingType::Dynamic => ScaleSource::Current {
                policy: ScalePolicy::Dynamic,
                // MX scales are powers of two: flooring quant_scale is RCEIL for its reciprocal.
                power_of_two: self.config.round_scales_to_power_of_two
                    || cast.granularity == Granularity::Mx,
            },
            ScalingType::Delayed => ScaleSource::Delayed {
                slot: slot.clone(),
                record: self.training,
                first_batch: self.first_batch.clone(),
            },
            ScalingType::Static => ScaleSource::Static(slot.clone()),
        };
        Some(Quantizer {
            cast: Cast::new(cast.format?),
            granularity: cast.granularity,
            source,
            counter: Some(self.state.counter().clone()),
        })
    }
}
