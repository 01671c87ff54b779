//! How a layer with a weight computes in one call: decided once, before anything is computed.

use super::StaticWeight;
use super::identity::SharedState;
use crate::autocast::{Context, Fp8State, LayerStep, Mode, Prepared, linear_plan};
use crate::error::{LayerError, Result};
use crate::module::Fp8Layer;
use candle_core::Tensor;
use fp8_candle::{LinearPlan, Role, device, fingerprint};
use fp8_core::ScaleGrid;
use fp8_ranks::ShardedVar;
use std::sync::Arc;

/// How a layer computes in one call.
pub(super) enum Call<'a> {
    /// In high precision.
    HighPrecision,
    /// From FP8 codes of a file, with inputs cast as the file says.
    Static(&'a StaticWeight),
    /// From dequantized FP8 codes of a file, in high precision.
    Dequantized(&'a StaticWeight),
    /// In high precision, with the amaxes of input and weight recorded.
    Calibrate(Arc<Fp8State>, Box<LayerStep>),
    /// By the guard's recipe.
    Fp8(Arc<Fp8State>, Box<LinearPlan>),
}

impl<'a> Call<'a> {
    /// Decides how `layer` computes under the innermost guard, and signs in with the guard's step.
    pub(super) fn decide(
        layer: &'a dyn Fp8Layer,
        state: &SharedState,
        context: Option<&Context>,
    ) -> Result<Self> {
        let mode = context.map(|context| context.settings.mode);
        let Some(context) = context else {
            return Ok(match layer.static_weight() {
                Some(weight) => Self::Static(weight),
                None => Self::HighPrecision,
            });
        };
        if let Some(weight) = layer.static_weight() {
            if mode == Some(Mode::HighPrecision) {
                return Ok(Self::Dequantized(weight));
            }
            context.count_static_cast();
            return Ok(Self::Static(weight));
        }
        let state = match state.prepared() {
            Prepared::With(state) => state,
            without => {
                let left_out = matches!(without, Prepared::LeftOut);
                context.note_unprepared(layer.path(), left_out);
                return Ok(Self::HighPrecision);
            }
        };
        let Some(step) = context.sign_in(&state)? else {
            return Ok(Self::HighPrecision);
        };
        if mode == Some(Mode::Calibrate) {
            return Ok(Self::Calibrate(state, step.into()));
        }
        let plan = linear_plan(&state, &step)?;
        if plan.fetches_codes && step.settings.training {
            check_codes_travel(layer, &state, &step)?;
        }
        Ok(Self::Fp8(state, plan.into()))
    }
}

/// Checks that the weight lies in parts on ranks that share the scale of its codes.
fn check_codes_travel(layer: &dyn Fp8Layer, state: &Fp8State, step: &LayerStep) -> Result<()> {
    let path = || state.path().to_string();
    let Some(weight) = ShardedVar::of(layer.held_weight()) else {
        return Err(LayerError::NotSharded { path: path() }.into());
    };
    let (settings, holders) = (&step.settings, weight.group());
    let is_shared = settings.config.shared_delayed_cast().is_some();
    let is_reduced = || match settings.group() {
        Some(group) => holders.is_within(group),
        None => holders.size() == 1,
    };
    if is_shared && !is_reduced() {
        return Err(LayerError::UnreducedCodes {
            path: path(),
            ranks: holders.size(),
            reducing: settings.reducing_ranks(),
        }
        .into());
    }
    Ok(())
}

/// Informs the guard if `result` is an error, so that its step does not count if the guard is then dropped.
pub(super) fn noting_failure<T>(context: Option<&Context>, result: Result<T>) -> Result<T> {
    if let (Err(_), Some(context)) = (&result, context) {
        context.note_failure();
    }
    result
}

/// Records the amaxes of input and weight, and the weight's fingerprint.
pub(super) fn calibrate(
    state: &Fp8State,
    step: &LayerStep,
    x: &Tensor,
    weight: impl FnOnce() -> Result<Tensor>,
) -> Result<()> {
    if step.replays {
        return Ok(());
    }
    let weight = &weight()?;
    state.note_calibrated_weight(fingerprint(weight)?);
    // An empty batch has no amax; another rank's batch may have one.
    let seen = |tensor: &Tensor| tensor.elem_count() > 0;
    let tensors = [(Role::Input, x), (Role::Weight, weight)];
    for (role, tensor) in tensors.into_iter().filter(|(_, tensor)| seen(tensor)) {
        let cols = tensor.dims().last().copied().unwrap_or(1);
        let grid = ScaleGrid::tensorwise(tensor.elem_count() / cols.max(1), cols);
        let values = tensor.detach().contiguous()?;
        let amax = device::backend(tensor.device())?.amax(&values, &grid)?;
        if let Some(slot) = state.slot(role) {
            step.cells.record(slot.row(), &amax, true)?;
        }
    }
    Ok(())
}
