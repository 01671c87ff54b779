//! Where the time of a thread goes: casts, products, attention and so on.
//!
//! [`record`] measures a closure; [`enter`] says what the calling thread does from here to the end of a scope. The operations of
//! this crate say it themselves. Times are exclusive: a cast within a linear layer is a cast, and what
//! no scope inside claims remains with the scope around it, so the parts of a [`Report`] add up to the whole.
//!
//! What is measured is the time of the host's calling thread. Loops over several threads count as long as the caller
//! waits for them. A CUDA device computes on while the host goes ahead: its times need events, and what stands here is
//! how long the launches took, and where the host waited.
//!
//! While nothing is recorded, [`enter`] costs one relaxed load.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use fp8_candle::{Quantizer, profile};
//! use fp8_core::{Contraction, Format, Granularity};
//!
//! let x = Tensor::randn(0f32, 1., (64, 64), &Device::Cpu)?;
//! let quantizer = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise);
//! let (codes, report) = profile::record(|| quantizer.quantize(&x, Contraction::Cols));
//! assert_eq!(codes?.tensor.dims(), [64, 64]);
//! assert!(report.time(profile::Kind::Cast) > std::time::Duration::ZERO);
//! println!("{report}");
//! # Ok::<(), fp8_candle::Error>(())
//! ```

mod kind;
mod report;

pub use kind::Kind;
pub use report::{Part, Report};

use kind::KINDS;
use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Recordings of all threads that run now.
static RECORDINGS: AtomicUsize = AtomicUsize::new(0);
static NEXT_ID: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static CLOCK: RefCell<Option<Clock>> = const { RefCell::new(None) };
}

/// A recording of this thread.
struct Clock {
    id: u64,
    /// Open scopes.
    scopes: Vec<Kind>,
    /// Time is counted up to this moment.
    counted: Instant,
    spent: [Duration; KINDS],
    /// The recording around this one.
    outer: Option<Box<Clock>>,
}

impl Clock {
    /// Gives the time since the last call to the innermost scope.
    fn count(&mut self) {
        let now = Instant::now();
        let kind = self.scopes.last().copied().unwrap_or(Kind::Other);
        self.spent[kind as usize] += now - self.counted;
        self.counted = now;
    }
}

/// Runs `f` and reports where its time on this thread went.
///
/// Recordings nest; the outer one contains the inner. Other threads record on their own.
///
/// ```
/// use fp8_candle::profile::{Kind, enter, record};
/// use std::{thread::sleep, time::Duration};
/// let (three, report) = record(|| {
///     let _data = enter(Kind::Data);
///     sleep(Duration::from_millis(2));
///     3
/// });
/// assert_eq!(three, 3);
/// assert!(report.time(Kind::Data) >= Duration::from_millis(2));
/// ```
pub fn record<R>(f: impl FnOnce() -> R) -> (R, Report) {
    /// Ends the recording, after a panic too.
    struct Running(u64);
    impl Running {
        fn end(&self) -> [Duration; KINDS] {
            let ended = CLOCK.with_borrow_mut(|clock| {
                let mut ended = clock.take_if(|clock| clock.id == self.0)?;
                ended.count();
                *clock = ended.outer.take().map(|outer| *outer);
                if let Some(outer) = clock {
                    // To the kinds it had, not to the scope in which it ran.
                    for (outer, inner) in outer.spent.iter_mut().zip(ended.spent) {
                        *outer += inner;
                    }
                    outer.counted = ended.counted;
                }
                RECORDINGS.fetch_sub(1, Ordering::Relaxed);
                Some(ended.spent)
            });
            ended.unwrap_or_default()
        }
    }
    impl Drop for Running {
        fn drop(&mut self) {
            self.end();
        }
    }

    let running = Running(NEXT_ID.fetch_add(1, Ordering::Relaxed));
    CLOCK.with_borrow_mut(|clock| {
        let outer = clock.take().map(|mut outer| {
            outer.count();
            Box::new(outer)
        });
        *clock = Some(Clock {
            id: running.0,
            scopes: vec![],
            counted: Instant::now(),
            spent: [Duration::ZERO; KINDS],
            outer,
        });
    });
    RECORDINGS.fetch_add(1, Ordering::Relaxed);
    let result = f();
    (result, Report::new(running.end()))
}

/// While it lives, time counts as one kind, except in scopes inside it.
#[must_use = "a scope ends where this is dropped"]
#[derive(Debug)]
pub struct Scope {
    /// The recording and the number of scopes around this one.
    place: Option<(u64, usize)>,
    /// The state of this thread.
    not_send: PhantomData<*const ()>,
}

/// Says what the calling thread does until the result is dropped; see [the module](self). Nothing happens while the thread
/// records nothing.
#[inline]
pub fn enter(kind: Kind) -> Scope {
    let place = match RECORDINGS.load(Ordering::Relaxed) {
        0 => None,
        _ => begin(kind),
    };
    Scope {
        place,
        not_send: PhantomData,
    }
}

#[cold]
fn begin(kind: Kind) -> Option<(u64, usize)> {
    // As in `end`.
    let place = CLOCK.try_with(|clock| {
        let mut clock = clock.borrow_mut();
        let clock = clock.as_mut()?;
        clock.count();
        clock.scopes.push(kind);
        Some((clock.id, clock.scopes.len() - 1))
    });
    place.ok().flatten()
}

impl Drop for Scope {
    #[inline]
    fn drop(&mut self) {
        if let Some(place) = self.place {
            end(place);
        }
    }
}

#[cold]
fn end((id, around): (u64, usize)) {
    // Without a panic while a thread's locals are being dropped.
    let _ = CLOCK.try_with(|clock| {
        let Ok(mut clock) = clock.try_borrow_mut() else {
            return;
        };
        if let Some(clock) = clock.as_mut().filter(|clock| clock.id == id) {
            clock.count();
            clock.scopes.truncate(around);
        }
    });
}

#[cfg(test)]
mod tests;
