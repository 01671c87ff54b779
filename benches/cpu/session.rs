//! What the cases of a child process share: threads, clock, pace, filter, and the way to report.

use crate::common::Common;
use crate::peaks::multiply_adds;
use crate::rows::{Bars, Measured, Metric, Row, Work};
use crate::timing::{Clock, Contestant, Pace, race};
use anyhow::Result;
use fp8::fp8_core::Isa;
use std::hint::black_box;
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
    /// Of what bounds the call, see [`Limit`].
    pub limit: Option<f64>,
}

/// What does the part `share` of a call's work that no call can do without, and nothing else: reading its bytes, or its multiply-adds.
pub struct Limit<'a> {
    pub contestant: Contestant<'a>,
    pub share: f64,
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

    /// [`Session::time`] beside what bounds the call: the bandwidth and the clock of a shared machine change from one minute to the next.
    pub fn time_beside(&self, field: Field<'_>, limit: Option<Limit<'_>>) -> Result<Times> {
        let share = limit.as_ref().map(|limit| limit.share);
        let limit = limit.map(|limit| limit.contestant);
        let others = [field.f32, field.bf16, field.q8_0, limit];
        let columns = others.each_ref().map(Option::is_some);
        let mut contestants = vec![field.ours];
        contestants.extend(others.into_iter().flatten());
        let mut medians = race(&mut contestants, &self.pace())?.into_iter();
        let ours = medians.next();
        let [f32, bf16, q8_0, limit] =
            columns.map(|there| if there { medians.next() } else { None });
        Ok(Times {
            ours,
            f32,
            bf16,
            q8_0,
            limit: limit.zip(share).map(|(ms, share)| ms / share),
        })
    }

    /// The level of the processor, or the forced one.
    fn level(&self) -> &'static str {
        self.forced.unwrap_or(Isa::best().level().name())
    }

    /// Whether the level multiplies in f32: no bf16 units.
    pub fn has_f32_units(&self) -> bool {
        matches!(self.level(), "avx2" | "avx512")
    }

    /// The multiply-adds of a product of `flop` operations, where they are made in f32.
    pub fn multiply_adds(&self, flop: f64) -> Option<Limit<'static>> {
        let run = multiply_adds(self.level())?;
        let threads = self.threads;
        let contestant = Contestant::new(move || {
            fp8::fp8_candle::parallel::for_each(0..threads, |_| {
                black_box(run());
            });
            Ok(())
        });
        let share = run() * threads as f64 / flop;
        Some(Limit { contestant, share })
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
            peak_fraction: (times.limit.zip(times.ours)).map(|(limit, ours)| limit / ours),
        };
        println!("{}", serde_json::to_string(&Measured { row, work })?);
        Ok(())
    }
}
