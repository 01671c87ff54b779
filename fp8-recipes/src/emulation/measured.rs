//! The measurements of an emulator.

use super::options::EmulatorOptions;
use crate::stats::{CastStats, StatsLog};

/// The statistics of measured steps, and their log.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) stats: CastStats,
    pub(super) every: u64,
    pub(super) log: Option<StatsLog>,
}

impl Measured {
    /// None if the options ask for no measurement.
    pub(super) fn new(options: &EmulatorOptions) -> Option<Self> {
        if options.stats.is_none() && options.stats_log.is_none() {
            return None;
        }
        Some(Self {
            stats: options.stats.clone().unwrap_or_default(),
            every: options.stats_every.max(1),
            log: options.stats_log.as_ref().map(StatsLog::to_file),
        })
    }
}
