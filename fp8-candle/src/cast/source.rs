//! Where the scales of a cast come from.

use crate::base::error::Result;
use crate::cast::state::{Scales, Slot};
use crate::device::ScalePolicy;
use candle_core::Tensor;
use fp8_core::{DelayedRule, Format};

/// Where the scales of a cast come from.
///
/// Two sources are equal if they give equal scales for one tensor at one time. Delayed sources are equal if they read the same
/// row: the rule and the first scale only matter while the row has no scale for the format.
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
    /// A quant_scale of 1: the values themselves are cast.
    Unscaled,
    /// A fixed dequant_scale, f32 with one element or one per scale of the grid.
    Fixed {
        /// The factor after decoding.
        dequant_scale: Tensor,
    },
    /// The scales of an earlier cast, f32, one element per scale of the grid.
    Known {
        /// The factor before the cast.
        quant_scale: Tensor,
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

impl PartialEq for ScaleSource {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (
                Self::Current {
                    policy,
                    power_of_two,
                },
                Self::Current {
                    policy: other_policy,
                    power_of_two: other_power_of_two,
                },
            ) => policy == other_policy && power_of_two == other_power_of_two,
            (Self::Delayed { slot, .. }, Self::Delayed { slot: other, .. })
            | (Self::Static(slot), Self::Static(other)) => slot == other,
            (
                Self::Fixed { dequant_scale },
                Self::Fixed {
                    dequant_scale: other,
                },
            ) => dequant_scale.id() == other.id(),
            (
                Self::Known { quant_scale, .. },
                Self::Known {
                    quant_scale: other, ..
                },
            ) => quant_scale.id() == other.id(),
            (Self::Unscaled, Self::Unscaled) => true,
            _ => false,
        }
    }
}

impl ScaleSource {
    /// Whether scales for later steps are made from the amaxes of these casts.
    pub(crate) fn is_delayed(&self) -> bool {
        matches!(self, Self::Delayed { .. })
    }

    /// The row that holds the scales; they change when it is updated.
    pub(crate) fn slot(&self) -> Option<&Slot> {
        match self {
            Self::Delayed { slot, .. } | Self::Static(slot) => Some(slot),
            _ => None,
        }
    }

    /// The scales of a cast to `format` if they do not depend on the tensor.
    ///
    /// # Errors
    /// If a static scale is missing.
    pub(crate) fn known_scales(&self, format: Format) -> Result<Option<Scales>> {
        Ok(match self {
            Self::Delayed { slot, rule, first } => {
                if *first == FirstScale::OwnAmax && slot.is_initial()? {
                    return Ok(None);
                }
                Some(slot.delayed_scale(format, rule)?)
            }
            Self::Static(slot) => Some(slot.static_scale(format)?),
            Self::Known {
                quant_scale,
                dequant_scale,
            } => Some((quant_scale.clone(), dequant_scale.clone())),
            Self::Current { .. } | Self::Unscaled | Self::Fixed { .. } => None,
        })
    }
}
