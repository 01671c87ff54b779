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
    ///
    /// ```
    /// # use fp8_recipes as fp8;
    /// # use candle_core::{DType, Device};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::emulation::{EmulationMethod, Emulator, EmulatorOptions};
    /// # use fp8_recipes::nn;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let vars = VarMap::new();
    /// # let model = nn::linear(32, 16, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("fc"))?;
    /// let stats = fp8::CastStats::default();
    /// let options = EmulatorOptions::default().with_stats(&stats, 3);
    /// let mut emulator = Emulator::initialize(&model, EmulationMethod::Direct, options)?;
    /// let due = (0..5).map(|step| {
    ///     emulator.update_global_steps(step);
    ///     emulator.measures_this_step()
    /// });
    /// assert!(due.eq([true, false, false, true, false]));
    /// # Ok(()) }
    /// ```
    pub fn measures_this_step(&self) -> bool {
        self.due().is_some()
    }

    /// The log of [`EmulatorOptions::with_stats_log`], which knows whether it could be written.
    ///
    /// ```
    /// # use candle_core::{DType, Device};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::emulation::{EmulationMethod, Emulator, EmulatorOptions};
    /// # use fp8_recipes::nn;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let vars = VarMap::new();
    /// # let model = nn::linear(32, 16, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("fc"))?;
    /// # let directory = tempfile::tempdir()?;
    /// let path = directory.path().join("missing/stats.jsonl");
    /// let options = EmulatorOptions::default().with_stats_log(&path, 100);
    /// let emulator = Emulator::initialize(&model, EmulationMethod::Direct, options)?;
    /// assert!(emulator.stats_log().unwrap().failure().is_none()); // so far
    /// # Ok(()) }
    /// ```
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
