//! A caller that was held up by a helper works alone for a while.
//!
//! If other processes keep every processor busy, helpers are interrupted in the middle of tasks again and again. Each time
//! the caller waits for a whole time slice, many times longer than the work of the helper would have taken it. Such a caller
//! is faster alone. It tries helpers again after a while, and waits longer each time that fails.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// A wait for a helper is worth avoiding if it takes this long, and the helper was without a processor as long.
const LATE: Duration = Duration::from_millis(1);

/// How long a caller works alone, at first and at most.
const FIRST: Duration = Duration::from_millis(32);
const LONGEST: Duration = Duration::from_millis(512);

#[derive(Clone, Copy)]
struct Alone {
    until: Instant,
    length: Duration,
}

thread_local! {
    static ALONE: Cell<Option<Alone>> = const { Cell::new(None) };
}

/// Whether this thread works alone for now.
pub(crate) fn alone() -> bool {
    let until = ALONE.get().map(|alone| alone.until);
    until.is_some_and(|until| Instant::now() < until)
}

/// Notes how long the caller has waited for helpers after one was interrupted.
pub(crate) fn note(waited: Duration) {
    if waited > LATE {
        ALONE.set(Some(after(ALONE.get(), Instant::now())));
    }
}

/// Measures whether this thread is interrupted, that is, loses its processor. A long task is not an interruption.
pub(crate) struct Watch {
    begun: Instant,
    cpu: Duration,
}

impl Watch {
    /// `None` if the system does not report the processor time of a thread.
    pub(crate) fn begin() -> Option<Self> {
        let (begun, cpu) = (Instant::now(), thread_time()?);
        Some(Self { begun, cpu })
    }

    pub(crate) fn was_interrupted(&self) -> bool {
        let passed = self.begun.elapsed();
        let worked = thread_time().map(|now| now.saturating_sub(self.cpu));
        worked.is_some_and(|worked| passed.saturating_sub(worked) > LATE)
    }
}

/// How long this thread has had a processor.
#[cfg(all(target_os = "linux", target_pointer_width = "64", not(miri)))]
fn thread_time() -> Option<Duration> {
    use std::ffi::c_int;
    const CLOCK_THREAD_CPUTIME_ID: c_int = 3;
    #[repr(C)]
    struct Timespec {
        seconds: i64,
        nanoseconds: i64,
    }
    unsafe extern "C" {
        fn clock_gettime(clock: c_int, time: *mut Timespec) -> c_int;
    }
    let mut time = Timespec {
        seconds: 0,
        nanoseconds: 0,
    };
    // SAFETY: it writes one `timespec`, which on 64-bit Linux is two 64-bit integers.
    let done = unsafe { clock_gettime(CLOCK_THREAD_CPUTIME_ID, &mut time) };
    let (seconds, nanoseconds) = (time.seconds.try_into(), time.nanoseconds.try_into());
    match (done, seconds, nanoseconds) {
        (0, Ok(seconds), Ok(nanoseconds)) => Some(Duration::new(seconds, nanoseconds)),
        _ => None,
    }
}

#[cfg(not(all(target_os = "linux", target_pointer_width = "64", not(miri))))]
fn thread_time() -> Option<Duration> {
    None
}

/// How long to work alone after a wait that ended `now`.
fn after(last: Option<Alone>, now: Instant) -> Alone {
    let length = match last {
        Some(last) if now < last.until + last.length => (2 * last.length).min(LONGEST),
        _ => FIRST,
    };
    Alone {
        until: now + length,
        length,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_alone_double_while_helpers_are_late_and_begin_anew() {
        let now = Instant::now();
        let first = after(None, now);
        assert_eq!((first.until, first.length), (now + FIRST, FIRST));
        let mut last = first;
        for _ in 0..10 {
            last = after(Some(last), last.until + last.length / 2);
        }
        assert_eq!(last.length, LONGEST);
        assert_eq!(after(Some(last), last.until + 2 * LONGEST).length, FIRST);
    }

    #[test]
    fn only_long_waits_count() {
        std::thread::spawn(|| {
            note(LATE / 2);
            assert!(!alone());
            note(2 * LATE);
            assert!(alone());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn time_without_a_processor_counts() {
        let Some(watch) = Watch::begin() else { return };
        std::thread::sleep(20 * LATE);
        assert!(watch.was_interrupted());
    }
}
