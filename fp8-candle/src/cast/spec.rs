//! The three parts of a cast: what it computes, where its scales come from, and its observers.

use crate::base::error::Result;
use crate::cast::shards::Shards;
use crate::cast::state::{AmaxRecorder, Scales, Slot};
use crate::cast::stochastic::Stochastic;
use crate::cast::tensor::Quantized;
use crate::device::{CurrentScale, ScalePolicy};
use candle_core::Tensor;
use fp8_core::{Cast, DelayedRule, Format, Granularity};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a cast computes: format, rounding, overflow, and which elements share a scale.
///
/// Two casts of one tensor give the same codes if their specifications are equal and so are their sources of scales.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct CastSpec {
    /// Format, rounding and overflow.
    pub cast: Cast,
    /// Which elements share a scale.
    pub granularity: Granularity,
    /// See [`Quantizer::with_amax_bound`](crate::Quantizer::with_amax_bound).
    pub amax_bound: Option<f32>,
    /// The source of random bits if rounding is stochastic.
    pub stochastic: Option<Stochastic>,
    /// The other parts of the tensor, if ranks hold it in parts.
    pub shards: Option<Arc<Shards>>,
}

impl CastSpec {
    /// A cast without a bound for amaxes and, unless `cast` says so, without stochastic rounding.
    pub fn new(cast: Cast, granularity: Granularity) -> Self {
        Self {
            cast,
            granularity,
            amax_bound: None,
            stochastic: None,
            shards: None,
        }
    }

    /// Whether one quantized copy serves GEMMs over either dimension.
    pub fn is_symmetric(&self) -> bool {
        match self.granularity {
            Granularity::Tensorwise => true,
            Granularity::Rowwise | Granularity::Mx => false,
            Granularity::Blockwise { rows, cols } => rows == cols,
        }
    }
}

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
    /// The scale of the slot, set by calibration. Values are divided by its dequant_scale.
    Static(Slot),
    /// A quant_scale of 1: the values themselves are cast.
    Unscaled,
    /// A fixed dequant_scale, f32 with one element or one per scale of the grid. Values are divided by it.
    Fixed {
        /// The factor after decoding.
        dequant_scale: Tensor,
    },
    /// The scales of an earlier cast, f32, one element per scale of the grid. That cast says whether values are divided:
    /// [`Cast::divides`].
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
                Self::Known {
                    quant_scale,
                    dequant_scale,
                },
                Self::Known {
                    quant_scale: other_quant_scale,
                    dequant_scale: other_dequant_scale,
                },
            ) => {
                // Casts that divide take the second one.
                quant_scale.id() == other_quant_scale.id()
                    && dequant_scale.id() == other_dequant_scale.id()
            }
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

    /// Whether values are divided by their dequant_scale, instead of multiplied by their quant_scale, whatever the cast says:
    /// casts with the scales of served files do, as those of compressed-tensors. Training multiplies, unless its scales
    /// are static.
    pub(crate) fn divides(&self) -> bool {
        match self {
            Self::Static(_) | Self::Fixed { .. } => true,
            Self::Current {
                policy,
                power_of_two,
            } => {
                let current = CurrentScale {
                    policy: *policy,
                    power_of_two: *power_of_two,
                };
                current.divides()
            }
            Self::Delayed { .. } | Self::Unscaled | Self::Known { .. } => false,
        }
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

/// Those of the scales that `cast` takes.
pub(crate) fn applied_scale<'a>(
    cast: &Cast,
    (quant_scale, dequant_scale): &'a Scales,
) -> &'a Tensor {
    cast.applied(quant_scale, dequant_scale)
}

/// Counts the tensors that were cast; a cached weight is not cast again.
pub type CastCounter = Arc<AtomicU64>;

/// Sees every cast of a [`Quantizer`](crate::Quantizer), for statistics.
pub trait CastHook: std::fmt::Debug + Send + Sync {
    /// `x` in high precision was cast to `quantized`, in a forward or a backward pass, on any thread.
    ///
    /// # Errors
    /// An error fails the pass.
    fn on_cast(&self, x: &Tensor, quantized: &Quantized) -> Result<()>;
}

/// The observers of a [`Quantizer`](crate::Quantizer)'s casts. Replayed casts do not reach them.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Observers {
    /// Incremented by every cast.
    pub counter: Option<CastCounter>,
    /// Records amaxes.
    pub recorder: Option<AmaxRecorder>,
    /// Sees every cast.
    pub hook: Option<Arc<dyn CastHook>>,
}

impl Observers {
    pub(crate) fn is_empty(&self) -> bool {
        self.counter.is_none() && self.recorder.is_none() && self.hook.is_none()
    }

    /// The recorder, if it records amaxes for delayed scales.
    pub(crate) fn training_recorder(&self) -> Option<&AmaxRecorder> {
        self.recorder.as_ref().filter(|recorder| recorder.record)
    }

    /// Counts a cast and records its amax. `makes_scales`: delayed scales are made from it.
    pub(crate) fn count_and_record(&self, amax: Option<&Tensor>, makes_scales: bool) -> Result<()> {
        if let Some(counter) = &self.counter {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        match &self.recorder {
            Some(recorder) => recorder.note(amax, makes_scales),
            None => Ok(()),
        }
    }
}
