//! The times of a recording.

use super::kind::{KINDS, Kind};
use std::fmt;
use std::time::Duration;

/// Times by kind, of one recording or of several added together. The `Display` form is a table with a line for each kind that took
/// any time: milliseconds of one recording, and the share of the whole.
///
/// ```
/// use fp8_candle::profile::{Kind, Report, enter, record};
/// let mut total = Report::default();
/// for _ in 0..3 {
///     let ((), report) = record(|| drop(enter(Kind::Loss)));
///     total.add(&report);
/// }
/// assert_eq!(total.recordings(), 3);
/// assert_eq!(total.whole(), Kind::all().map(|kind| total.time(kind)).sum());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    recordings: u64,
    spent: [Duration; KINDS],
}

/// One line of a [`Report`], as plain numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Part {
    /// What the time was spent at.
    pub kind: Kind,
    /// Milliseconds of one recording, in the mean.
    pub ms: f64,
    /// Part of the whole time: 0 to 1.
    pub share: f64,
}

impl Report {
    pub(super) fn new(spent: [Duration; KINDS]) -> Self {
        Self {
            recordings: 1,
            spent,
        }
    }

    /// Adds the times of other recordings.
    pub fn add(&mut self, other: &Self) {
        self.recordings += other.recordings;
        for (spent, more) in self.spent.iter_mut().zip(other.spent) {
            *spent += more;
        }
    }

    /// How many recordings these are.
    pub fn recordings(&self) -> u64 {
        self.recordings
    }

    /// Time of one kind in all recordings.
    pub fn time(&self, kind: Kind) -> Duration {
        self.spent[kind as usize]
    }

    /// Time of all kinds in all recordings.
    pub fn whole(&self) -> Duration {
        self.spent.iter().sum()
    }

    /// Every kind that took any time.
    pub fn parts(&self) -> Vec<Part> {
        let whole = self.whole().as_secs_f64();
        let part = |kind: Kind| {
            let seconds = self.time(kind).as_secs_f64();
            Part {
                kind,
                ms: seconds * 1e3 / self.recordings.max(1) as f64,
                share: seconds / whole,
            }
        };
        (Kind::all().filter(|&kind| !self.time(kind).is_zero()))
            .map(part)
            .collect()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Part { kind, ms, share } in self.parts() {
            writeln!(f, "{:<12} {ms:>9.2} ms {:>6.1}%", kind.name(), share * 100.)?;
        }
        let ms = self.whole().as_secs_f64() * 1e3 / self.recordings.max(1) as f64;
        write!(f, "{:<12} {ms:>9.2} ms", "whole")
    }
}
