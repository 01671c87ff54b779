//! Observing casts: amax, scales, saturation, underflow and signal to noise of each layer's tensors.

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
