//! What casts do to the tensors of each layer: amax, scales, saturation, underflow, signal to noise.

mod curves;
mod drawing;
mod log;
mod observer;
mod quantity;

mod cast_stats;
mod report;

pub use cast_stats::CastStats;
pub use curves::StatsCurves;
pub use log::StatsLog;
pub(crate) use observer::hook;
pub use observer::{CastEvent, CastObserver};
pub use quantity::StatsQuantity;
pub use report::{StatsReport, StatsRow};
