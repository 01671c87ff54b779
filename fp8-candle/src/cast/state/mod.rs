//! The scaling state of a model: one table, a row for each tensor role of each layer.
//!
//! | column | holds |
//! |---|---|
//! | running amax | the largest finite amax recorded since the last update |
//! | amax history, quant_scale, dequant_scale | delayed scaling, after "FP8 Formats for Deep Learning" (arXiv:2209.05433) and Transformer Engine's `DelayedScaling` |
//! | non-finite count | how many casts saw Inf or NaN; such an amax is counted but not stored, unlike in Transformer Engine |
//! | calibrated amax, format of the scale | on the host |
//!
//! Columns are contiguous tensors on the table's device. Recording takes a maximum in a cell, an update makes new columns
//! for all rows at once, and for a reduction over ranks the amaxes of all rows are one vector of fixed length.
//!
//! A step records into cells of its own ([`StepCells`]): committing the step merges them into the table, aborting it drops
//! them.

mod calibration;
mod group;
#[cfg(feature = "cuda")]
mod lasting;
mod mark;
mod non_finite;
mod reduction;
mod role;
mod saved;
mod slot;
mod step;
mod table;
mod update;
mod window;

pub use calibration::CalibrationRow;
pub use group::{ReductionGroup, SingleProcess};
#[cfg(feature = "cuda")]
pub(crate) use lasting::Lasting;
pub use mark::StepMark;
pub use non_finite::{Judged, NonFinite, NonFiniteCounts};
pub use role::Role;
pub use saved::SavedRow;
pub(crate) use slot::Scales;
pub use slot::{Slot, SlotTensors};
pub(crate) use step::is_non_finite;
pub use step::{AmaxRecorder, StepCells};
pub use table::{IdleRule, RowRule, StateTable};
