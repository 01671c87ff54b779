//! The times that are known, in memory and in a file.

use super::cache::{self, Times};
use super::machine::machine;
use super::measure::measure;
use super::{LayerCase, LayerTiming};
use crate::error::Result;
use candle_core::Device;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

type Clock = dyn Fn(&LayerCase, &Device, Duration) -> Result<LayerTiming> + Send + Sync;

/// Times of layers. Each is measured once and kept in a file, for every program on this machine. Clones share what they know.
///
/// The file is `fp8/layer_timings.json` in the user's folder for caches (`$XDG_CACHE_HOME` or `~/.cache` on Linux). Its times hold
/// for one processor or accelerator, instruction set, number of threads and version of this crate. A file that cannot be used is a
/// [warning](LayerTimings::warnings), and left as it is.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::Device;
/// use fp8::timings::{Computation, LayerCase, LayerTimings};
/// use std::time::Duration;
/// # fn main() -> Result<(), fp8::Error> {
/// let timings = LayerTimings::new().without_file().with_budget(Duration::from_millis(20));
/// let case = LayerCase::new(Computation::training(fp8::RecipeName::Delayed), (64, 32), 8);
/// let timing = timings.get(&case, &Device::Cpu)?;
/// println!("{case}: {timing}, FP8 pays: {}", timing.fp8_pays);
/// assert_eq!(timings.get(&case, &Device::Cpu)?, timing); // not measured again
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct LayerTimings {
    file: Option<PathBuf>,
    /// Whether the caller has named the file.
    file_named: bool,
    budget: Duration,
    clock: Arc<Clock>,
    known: Arc<Mutex<Known>>,
}

#[derive(Default)]
struct Known {
    /// None before the file is read.
    times: Option<Times>,
    /// Errors of the file. After the first one it is not used any more.
    warnings: Vec<String>,
}

impl Default for LayerTimings {
    fn default() -> Self {
        Self {
            file: cache::default_path(),
            file_named: false,
            budget: Duration::from_millis(500),
            clock: Arc::new(measure),
            known: Arc::default(),
        }
    }
}

impl LayerTimings {
    /// Times in the user's folder for caches.
    pub fn new() -> Self {
        Self::default()
    }

    /// Keeps times in this file.
    #[must_use]
    pub fn with_file(mut self, path: impl Into<PathBuf>) -> Self {
        (self.file, self.known) = (Some(path.into()), Arc::default());
        self.file_named = true;
        self
    }

    /// Keeps times in memory alone.
    #[must_use]
    pub fn without_file(mut self) -> Self {
        (self.file, self.known) = (None, Arc::default());
        self
    }

    /// How long to measure a case, half a second by default. Cases in which a few calls take longer are measured longer.
    #[must_use]
    pub fn with_budget(mut self, budget: Duration) -> Self {
        self.budget = budget;
        self
    }

    /// Takes times from `clock` in place of measuring them: from a table, say, or from another machine. They are kept in memory, and in a
    /// file only if [`LayerTimings::with_file`] names it: the file of all programs has what this machine has measured.
    #[must_use]
    pub fn with_clock(
        mut self,
        clock: impl Fn(&LayerCase, &Device) -> Result<LayerTiming> + Send + Sync + 'static,
    ) -> Self {
        self.clock = Arc::new(move |case, device, _| clock(case, device));
        self.known = Arc::default();
        self.file = self.file.filter(|_| self.file_named);
        self
    }

    /// The file of times, if there is one.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// What went wrong with the file; the times themselves are right.
    pub fn warnings(&self) -> Vec<String> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.warnings.clone()
    }

    /// The times of `case` on `device`, measured unless they are known.
    ///
    /// # Errors
    /// If a size is 0, the recipe inconsistent, or an operation of the layer fails.
    pub fn get(&self, case: &LayerCase, device: &Device) -> Result<LayerTiming> {
        case.check()?;
        let (machine, key) = (machine(device)?, case.key()?);
        // Held while measuring: two measurements at a time would disturb each other.
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let Known { times, warnings } = &mut *known;
        let times = times.get_or_insert_with(|| {
            let read = self.file.as_deref().map_or(Ok(Times::new()), cache::read);
            read.unwrap_or_else(|error| {
                warn(warnings, &error);
                Times::new()
            })
        });
        let times = times.entry(machine.clone()).or_default();
        if let Some(timing) = times.get(&key) {
            return Ok(*timing);
        }
        let timing = (self.clock)(case, device, self.budget)?;
        times.insert(key.clone(), timing);
        if let (Some(file), true) = (&self.file, warnings.is_empty())
            && let Err(error) = cache::add(file, &machine, &key, timing)
        {
            warn(warnings, &error);
        }
        Ok(timing)
    }
}

fn warn(warnings: &mut Vec<String>, error: &fp8_files::Error) {
    let text = format!("times of layers are not kept: {error}");
    tracing::warn!("{text}");
    warnings.push(text);
}

impl fmt::Debug for LayerTimings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerTimings")
            .field("file", &self.file)
            .field("budget", &self.budget)
            .finish_non_exhaustive()
    }
}
