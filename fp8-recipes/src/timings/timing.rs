//! The times of a layer and the decision.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// The times of one call of a layer, medians, and the decision that follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Stored", into = "Stored")]
#[non_exhaustive]
pub struct LayerTiming {
    /// In FP8.
    pub fp8: Duration,
    /// In high precision.
    pub high_precision: Duration,
    /// Whether FP8 is faster, by more than times differ from run to run.
    pub fp8_pays: bool,
}

/// FP8 has to be faster by this factor: smaller differences change from run to run.
const WORTH: f64 = 1.03;

impl LayerTiming {
    /// FP8 pays if it is faster by at least 3%: smaller differences change from run to run.
    pub fn new(fp8: Duration, high_precision: Duration) -> Self {
        let mut timing = Self {
            fp8,
            high_precision,
            fp8_pays: false,
        };
        timing.fp8_pays = timing.speedup() >= WORTH;
        timing
    }

    /// How many times as fast FP8 is.
    pub fn speedup(&self) -> f64 {
        self.high_precision.as_secs_f64() / self.fp8.as_secs_f64().max(1e-9)
    }
}

/// `0.214 ms against 0.31 ms`.
impl fmt::Display for LayerTiming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        write!(
            f,
            "{:.3} ms against {:.3} ms",
            ms(self.fp8),
            ms(self.high_precision)
        )
    }
}

/// The form in the file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    fp8_ns: u64,
    high_precision_ns: u64,
    fp8_pays: bool,
}

impl From<Stored> for LayerTiming {
    fn from(stored: Stored) -> Self {
        Self {
            fp8: Duration::from_nanos(stored.fp8_ns),
            high_precision: Duration::from_nanos(stored.high_precision_ns),
            fp8_pays: stored.fp8_pays,
        }
    }
}

impl From<LayerTiming> for Stored {
    fn from(timing: LayerTiming) -> Self {
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Self {
            fp8_ns: ns(timing.fp8),
            high_precision_ns: ns(timing.high_precision),
            fp8_pays: timing.fp8_pays,
        }
    }
}
