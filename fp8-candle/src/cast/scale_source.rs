//! Where the scale of a cast comes from.

use crate::cast::state::Slot;
use crate::device::ScalePolicy;
use candle_core::Tensor;
use fp8_core::DelayedRule;

/// Where the quant_scale of a cast comes from.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum ScaleSource {
    /// The amax of the tensor itself.
    Current {
        /// Formula from amax to quant_scale.
        policy: ScalePolicy,
        /// Floor the quant_scale to a power of two.
        power_of_two: bool,
    },
    /// The scale of the slot, made in earlier steps.
    Delayed {
        /// State of this tensor role.
        slot: Slot,
        /// How to make the scale if the slot has none for this format.
        rule: DelayedRule,
        /// The scale to use before a step has made one.
        first: FirstScale,
    },
    /// The scale of the slot, set by calibration.
    Static(Slot),
    /// None: the values themselves are cast, with a quant_scale of 1.
    Unscaled,
    /// A fixed dequant_scale, f32 with one element or one per scale of the grid.
    Fixed {
        /// The factor after decoding.
        dequant_scale: Tensor,
    },
}

/// The scale of delayed casts before the first update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FirstScale {
    /// 1, as in Transformer Engine.
    One,
    /// Made from the amax of the tensor itself, as the first update will.
    OwnAmax,
}
