//! Contestants that take turns, and the clocks that time them.

use crate::spread::median;
use anyhow::Result;
use std::time::{Duration, Instant};

/// A call shorter than this is repeated until a sample is about as long.
const SAMPLE: Duration = Duration::from_millis(5);
/// Thread pools spin for a while after their work; the next contestant must not share the cores with that.
const SETTLE: Duration = Duration::from_millis(3);

/// The clock of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// CPU time of all threads of the process.
    Cpu,
    /// Wall time.
    Wall,
}

/// How long to time a case.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    pub clock: Clock,
    pub min_rounds: usize,
    pub max_rounds: usize,
    pub budget: Duration,
}

type Step<'a> = Box<dyn FnMut() -> Result<()> + 'a>;

/// Something to time.
pub struct Contestant<'a> {
    setup: Option<Step<'a>>,
    run: Step<'a>,
    /// Calls that one `run` makes.
    calls: usize,
    optional: bool,
    warm: bool,
    /// Seconds of a call, by the clock of the case.
    samples: Vec<f64>,
    spent: Duration,
    reps: usize,
}

impl<'a> Contestant<'a> {
    /// `run` is timed. It drops its results before it returns.
    pub fn new(run: impl FnMut() -> Result<()> + 'a) -> Self {
        Self {
            setup: None,
            run: Box::new(run),
            calls: 1,
            optional: false,
            warm: false,
            samples: vec![],
            spent: Duration::ZERO,
            reps: 1,
        }
    }

    /// Runs before every timed run, untimed.
    pub fn with_setup(mut self, setup: impl FnMut() -> Result<()> + 'a) -> Self {
        self.setup = Some(Box::new(setup));
        self
    }

    /// Declares that one run makes several calls, for calls too short to time one by one.
    pub fn with_calls(mut self, calls: usize) -> Self {
        self.calls = calls;
        self
    }

    /// Stops after its share of the budget; for columns without a bar.
    pub fn optional(mut self) -> Self {
        self.optional = true;
        self
    }

    /// Declares that it has run before, and that one run is long enough to time.
    pub fn warm(mut self) -> Self {
        self.warm = true;
        self
    }

    /// Seconds of a call.
    fn sample(&mut self, clock: Clock, reps: usize) -> Result<f64> {
        let mut sum = 0.;
        for _ in 0..reps {
            if let Some(setup) = &mut self.setup {
                setup()?;
            }
            let (wall, cpu) = (Instant::now(), process_cpu());
            (self.run)()?;
            let (wall, cpu) = (wall.elapsed(), process_cpu() - cpu);
            sum += match clock {
                Clock::Cpu => cpu,
                Clock::Wall => wall.as_secs_f64(),
            };
            self.spent += wall;
        }
        Ok(sum / (reps * self.calls) as f64)
    }

    /// Median milliseconds of a call.
    fn median_ms(&self) -> f64 {
        median(self.samples.iter().copied()) * 1e3
    }
}

/// Warms up, lets the contestants take turns, and gives each one's median time of a call in ms.
pub fn race(contestants: &mut [Contestant<'_>], pace: &Pace) -> Result<Vec<f64>> {
    for contestant in contestants.iter_mut().filter(|c| !c.warm) {
        // The first call of all is slow, and the first contestant would get the fewest repetitions for it.
        contestant.sample(pace.clock, 1)?;
    }
    for contestant in contestants.iter_mut().filter(|c| !c.warm) {
        let began = Instant::now();
        contestant.sample(pace.clock, 1)?;
        let once = began.elapsed().as_secs_f64().max(1e-7);
        contestant.reps = ((SAMPLE.as_secs_f64() / once).ceil() as usize).clamp(1, 1000);
        contestant.spent = Duration::ZERO;
    }
    let share = pace.budget / contestants.len() as u32;
    let began = Instant::now();
    for round in 0..pace.max_rounds {
        if round >= pace.min_rounds && began.elapsed() >= pace.budget {
            break;
        }
        for turn in 0..contestants.len() {
            // Every other round backwards: what one contestant leaves in caches and pools helps or hurts each neighbour alike.
            let turn = match round % 2 {
                0 => turn,
                _ => contestants.len() - 1 - turn,
            };
            let contestant = &mut contestants[turn];
            if contestant.optional && round > 0 && contestant.spent > share {
                continue;
            }
            if pace.clock == Clock::Wall {
                std::thread::sleep(SETTLE);
            }
            let sample = contestant.sample(pace.clock, contestant.reps)?;
            contestant.samples.push(sample);
        }
    }
    Ok(contestants.iter().map(|c| c.median_ms()).collect())
}

/// Seconds of CPU time of the calling thread.
pub fn thread_cpu() -> f64 {
    clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

fn process_cpu() -> f64 {
    clock(libc::CLOCK_PROCESS_CPUTIME_ID)
}

fn clock(id: libc::clockid_t) -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a valid place for the result, and both clocks exist on every Unix that Rust has.
    let status = unsafe { libc::clock_gettime(id, &mut time) };
    assert_eq!(status, 0, "clock_gettime({id}) failed");
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
