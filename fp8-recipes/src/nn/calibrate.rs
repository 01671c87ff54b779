//! What a layer does in a calibrating guard.

use crate::autocast::{Fp8State, LayerStep};
use crate::error::Result;
use candle_core::Tensor;
use fp8_candle::{Role, device, fingerprint};
use fp8_core::ScaleGrid;

/// Records the amaxes of input and weight, and which weight it was.
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
    // An empty batch says nothing of the inputs; another rank's may.
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
