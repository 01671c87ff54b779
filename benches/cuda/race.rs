//! Contestants that take turns on a GPU, timed by events.
//!
//! Nothing waits for the GPU between the first and the last timed call: the driver gives freed memory back to the system
//! at each wait, and takes milliseconds to map it anew.

use crate::clock::{Clock, Mark};
use crate::spread::Spread;
use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use std::time::Instant;

/// A shorter call is repeated until a sample is about as long, in milliseconds.
const SAMPLE_MS: f64 = 2.;
/// The most calls of a sample: the host would wait if it launched more than the driver queues.
const MOST_CALLS: usize = 32;
/// Bytes of the tensor whose copies keep the GPU busy.
const PLUG: usize = 256 << 20;

/// How long a race lasts.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    pub min_rounds: usize,
    pub max_rounds: usize,
    pub budget_ms: f64,
}

/// Something to time.
pub struct Contestant<'a> {
    run: Box<dyn FnMut(usize) -> Result<()> + 'a>,
    queued: bool,
    turn: usize,
    calls: usize,
    plugs: usize,
    marks: Vec<(Mark, Mark)>,
}

impl<'a> Contestant<'a> {
    /// `run` gets a number that goes up with each call, to choose among several inputs. Dropping its result is timed, too.
    pub fn new<T>(mut run: impl FnMut(usize) -> Result<T> + 'a) -> Self {
        Self {
            run: Box::new(move |turn| run(turn).map(drop)),
            queued: false,
            turn: 0,
            calls: 1,
            plugs: 0,
            marks: vec![],
        }
    }

    /// Has the host queue every sample while the GPU is busy with something else.
    pub fn queued(mut self) -> Self {
        self.queued = true;
        self
    }

    fn call(&mut self) -> Result<()> {
        self.turn += 1;
        (self.run)(self.turn - 1)
    }
}

/// Times contestants on one device.
pub struct Track {
    device: Device,
    clock: Clock,
    plug: Tensor,
    plug_ms: f64,
}

impl Track {
    /// `shrink` divides both sides of the plug as well.
    pub fn new(device: &Device, shrink: usize) -> Result<Self> {
        let plug = Tensor::zeros((PLUG / shrink / shrink).max(1), DType::U8, device)?;
        let mut track = Self {
            device: device.clone(),
            clock: Clock::new(device),
            plug,
            plug_ms: 1.,
        };
        let plug = track.plug.clone();
        let copy = Contestant::new(|_| Ok(plug.copy()?));
        let pace = Pace {
            min_rounds: 3,
            max_rounds: 3,
            budget_ms: 0.,
        };
        track.plug_ms = track.race(vec![copy], &pace)?[0];
        Ok(track)
    }

    /// Warms up, lets the contestants take turns, and gives each one's median time of a call in ms.
    pub fn race(&self, mut contestants: Vec<Contestant<'_>>, pace: &Pace) -> Result<Vec<f64>> {
        let mut round_ms = 0.;
        for contestant in &mut contestants {
            contestant.call()?;
            contestant.call()?;
            self.device.synchronize()?;
            let start = Instant::now();
            contestant.call()?;
            let host_ms = ms_since(start);
            self.device.synchronize()?;
            let ms = ms_since(start);
            contestant.calls = ((SAMPLE_MS / ms).ceil() as usize).clamp(1, MOST_CALLS);
            if contestant.queued {
                let host_ms = 1.5 * host_ms * contestant.calls as f64;
                contestant.plugs = ((host_ms / self.plug_ms).ceil() as usize).clamp(1, 100);
            }
            round_ms += ms * contestant.calls as f64 + self.plug_ms * contestant.plugs as f64;
        }
        let rounds = (pace.budget_ms / round_ms) as usize;
        // The first round is not timed.
        for round in 0..=rounds.clamp(pace.min_rounds, pace.max_rounds) {
            for contestant in &mut contestants {
                let marks = self.sample(contestant)?;
                if round > 0 {
                    contestant.marks.push(marks);
                }
            }
        }
        contestants
            .iter()
            .map(|contestant| {
                let ms = contestant
                    .marks
                    .iter()
                    .map(|(begin, end)| begin.ms_until(end));
                let spread = Spread::of(ms.collect::<Result<_>>()?)?;
                Ok(spread.median / contestant.calls as f64)
            })
            .collect()
    }

    fn sample(&self, contestant: &mut Contestant<'_>) -> Result<(Mark, Mark)> {
        for _ in 0..contestant.plugs {
            self.plug.copy()?;
        }
        let begin = self.clock.mark()?;
        for _ in 0..contestant.calls {
            contestant.call()?;
        }
        Ok((begin, self.clock.mark()?))
    }
}

fn ms_since(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}
