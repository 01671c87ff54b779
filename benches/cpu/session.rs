//! What the cases of a child process share: threads, clock, pace, filter, and the way to report.

use crate::common::Common;
use crate::rows::{Bars, Measured, Metric, Row, Work};
use crate::timing::{Clock, Contestant, Pace, race};
use anyhow::Result;
use fp8::fp8_core::Isa;
use std::time::Duration;

/// A child process at work.
pub struct Session {
    args: Common,
    /// Threads of ours and of candle.
    pub threads: usize,
    /// The instruction set, if the parent has forced one.
    pub forced: Option<&'static str>,
}

/// Median milliseconds of a call.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    pub ours: Option<f64>,
    pub f32: Option<f64>,
    pub bf16: Option<f64>,
    pub q8_0: Option<f64>,
    /// Of reading what must come from memory.
    pub read: Option<f64>,
}

/// The contestants of a case by column.
pub struct Field<'a> {
    pub ours: Contestant<'a>,
    pub f32: Option<Contestant<'a>>,
    pub bf16: Option<Contestant<'a>>,
    pub q8_0: Option<Contestant<'a>>,
}

impl Session {
    /// Sets the number of threads to `RAYON_NUM_THREADS`, which candle reads as well.
    pub fn new(args: &Common) -> Result<Self> {
        let threads = candle_core::utils::get_num_threads();
        // The calling thread stays outside of the pool: no autocast guard opens on a worker.
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build_global()?;
        let forced = std::env::var_os("FP8_ISA").map(|_| Isa::best().level().name());
        Ok(Self {
            args: args.clone(),
            threads,
            forced,
        })
    }

    /// The name of a case, with a forced instruction set.
    pub fn name(&self, case: impl Into<String>) -> String {
        let case = case.into();
        match self.forced {
            None => case,
            Some(isa) => format!("{case} FP8_ISA={isa}"),
        }
    }

    /// Whether the filter lets a case through.
    pub fn wants(&self, case: &str) -> bool {
        self.args.wants(case)
    }

    /// [`Session::wants`] for a case that takes minutes: a quick run includes it only if a filter names it.
    pub fn wants_large(&self, case: &str) -> bool {
        self.args.wants(case) && (!self.args.quick || self.args.filter.is_some())
    }

    /// Whether this is a quick run.
    pub fn quick(&self) -> bool {
        self.args.quick
    }

    /// How long to time a case.
    pub fn pace(&self) -> Pace {
        let clock = if self.threads == 1 {
            Clock::Cpu
        } else {
            Clock::Wall
        };
        let (min_rounds, budget) = match (self.quick(), self.forced) {
            (true, _) => (3, 200),
            (false, None) => (7, 1500),
            (false, Some(_)) => (7, 800),
        };
        Pace {
            clock,
            min_rounds,
            max_rounds: 101,
            budget: Duration::from_millis(budget),
        }
    }

    /// Lets the contestants of a case take turns.
    pub fn time(&self, field: Field<'_>) -> Result<Times> {
        self.time_beside(field, None)
    }

    /// [`Session::time`] beside what reads the same bytes and does nothing else: the bandwidth of a shared machine changes from one minute
    /// to the next.
    pub fn time_beside(&self, field: Field<'_>, read: Option<Contestant<'_>>) -> Result<Times> {
        let others = [field.f32, field.bf16, field.q8_0, read];
        let columns = others.each_ref().map(Option::is_some);
        let mut contestants = vec![field.ours];
        contestants.extend(others.into_iter().flatten());
        let mut medians = race(&mut contestants, &self.pace())?.into_iter();
        let ours = medians.next();
        let [f32, bf16, q8_0, read] =
            columns.map(|there| if there { medians.next() } else { None });
        Ok(Times {
            ours,
            f32,
            bf16,
            q8_0,
            read,
        })
    }

    /// Whether the level multiplies in f32: no bf16 units.
    pub fn has_f32_units(&self) -> bool {
        let level = self.forced.unwrap_or(Isa::best().level().name());
        matches!(level, "avx2" | "avx512")
    }

    /// Reports a case that is judged by `ratio_f32`.
    pub fn report_ratio(
        &self,
        case: String,
        bars: impl Into<Bars>,
        times: Times,
        work: Work,
    ) -> Result<()> {
        let value = times.f32.unwrap_or(f64::NAN) / times.ours.unwrap_or(f64::NAN);
        self.report(case, (Metric::RatioF32, value), bars, times, Some(work))
    }

    /// Sends a row to the parent.
    pub fn report(
        &self,
        case: String,
        (metric, value): (Metric, f64),
        bars: impl Into<Bars>,
        times: Times,
        work: Option<Work>,
    ) -> Result<()> {
        let row = Row {
            case,
            threads: self.threads,
            metric,
            value,
            bars: bars.into(),
            ours_ms: times.ours,
            candle_f32_ms: times.f32,
            candle_bf16_ms: times.bf16,
            q8_0_ms: times.q8_0,
            peak_fraction: times.read.zip(times.ours).map(|(read, ours)| read / ours),
        };
        println!("{}", serde_json::to_string(&Measured { row, work })?);
        Ok(())
    }
}
