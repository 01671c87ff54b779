//! Which steps of an emulator are measured, and where the measures go.

use super::{Emulator, EmulatorOptions};
use crate::stats::{CastStats, StatsLog};

/// What is measured of which steps, and where it goes.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) stats: CastStats,
    every: u64,
    log: Option<StatsLog>,
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

impl Emulator {
    /// Where the coming step is measured, if it is.
    pub(super) fn due(&self) -> Option<&Measured> {
        let measured = self.measured.as_ref();
        measured.filter(|measured| self.global_steps.is_multiple_of(measured.every))
    }

    /// Whether the coming step is measured: the one place that decides it. After the step the count is another.
    pub fn measures_this_step(&self) -> bool {
        self.due().is_some()
    }

    /// The log of [`EmulatorOptions::with_stats_log`], which knows whether it could be written.
    pub fn stats_log(&self) -> Option<&StatsLog> {
        self.measured.as_ref()?.log.as_ref()
    }

    /// Writes what was measured of the step under its number, and counts it.
    pub(super) fn end_step(&mut self) {
        if self.measures_this_step()
            && let Some(measured) = &mut self.measured
            && let Some(log) = &mut measured.log
        {
            log.record(self.global_steps, &measured.stats);
        }
        self.global_steps += 1;
    }
}
