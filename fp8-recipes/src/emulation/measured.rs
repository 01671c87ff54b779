//! Which steps of an emulator are measured, and where the measures go.

use super::options::EmulatorOptions;
use crate::stats::{CastStats, StatsLog};

/// What is measured of which steps, and where it goes.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) stats: CastStats,
    pub(super) every: u64,
    pub(super) log: Option<StatsLog>,
}

impl Measured {
    /// None where the options ask for nothing.
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
