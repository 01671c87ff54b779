//! Callers that helpers have held up go on alone for a while.
//!
//! Beside a busy process on every processor, a helper loses its processor in the middle of a task again and again, and its
//! caller each time a whole time slice, which is many times what the helper does in between. Such a caller is better off with
//! one processor to itself. After a while it tries again, and after longer ones as long as that fails.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// A wait for helpers of this length, and of some tasks, is one for a processor.
const LATE: Duration = Duration::from_millis(1);
const TASKS: u32 = 3;

/// How long a caller goes on alone at first, and at most.
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
pub(super) fn alone() -> bool {
    let until = ALONE.get().map(|alone| alone.until);
    until.is_some_and(|until| Instant::now() < until)
}

/// Notes how long the caller waited for helpers after its own tasks, which took `task` each.
pub(super) fn note(task: Option<Duration>, waited: Duration) {
    let Some(task) = task else { return };
    if waited > LATE && waited > TASKS * task {
        ALONE.set(Some(after(ALONE.get(), Instant::now())));
    }
}

/// The time alone after a wait that ended `now`.
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
            note(None, 100 * LATE);
            note(Some(LATE), 2 * LATE);
            note(Some(LATE / 100), LATE / 2);
            assert!(!alone());
            note(Some(LATE / 100), 2 * LATE);
            assert!(alone());
        })
        .join()
        .unwrap();
    }
}
