//! How a rank that cannot continue ends.
//!
//! It prints one line and leaves the process at once, without `MPI_Finalize` (which would wait for the other ranks): `mpirun` sees a
//! rank that has ended early, and ends the others.

use crate::error::Operation;
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

/// Exit code of a rank that gave up.
pub const EXIT_CODE: i32 = 70;

/// The last call of this process, for a rank that ends outside of a call.
static LAST: Mutex<Option<(Operation, Arc<str>)>> = Mutex::new(None);

/// Notes a call.
pub(crate) fn note(operation: Operation, group: &Arc<str>) {
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    *last = Some((operation, Arc::clone(group)));
}

/// `after all_reduce of group "world"`.
fn after() -> String {
    let last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    match &*last {
        Some((operation, group)) => format!("after {operation} of group {group:?}"),
        None => "before its first operation".to_owned(),
    }
}

/// Prints `message` as one line and ends the process.
pub(crate) fn end(message: &str) -> ! {
    // In one piece, so that the lines of several ranks do not mix. It does not matter whether anybody reads it.
    let line = format!("{}\n", message.replace('\n', " "));
    let _ = std::io::stderr().write_all(line.as_bytes());
    leave()
}

#[cfg(unix)]
fn leave() -> ! {
    // SAFETY: `_exit` has no conditions. Unlike `exit` it runs no handlers, which may wait for other ranks or for this thread.
    unsafe { libc::_exit(EXIT_CODE) }
}

#[cfg(not(unix))]
fn leave() -> ! {
    std::process::exit(EXIT_CODE)
}

/// Ends the process of a rank that has left its work for no reason that this crate knows.
pub(crate) fn left(rank: usize, size: usize) -> ! {
    let after = after();
    end(&format!(
        "rank {rank} of {size}: {after} its `World` was dropped without `finish`: an error, a panic or an early return left the work"
    ))
}

/// From now on a panic on any thread ends the process, after its message: unwinding would leave the others waiting.
#[cfg(feature = "mpi")]
pub(crate) fn end_on_panic(rank: usize, size: usize) {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        before(panic);
        let after = after();
        let thread = std::thread::current();
        let thread = thread.name().unwrap_or("without a name").to_owned();
        end(&format!(
            "rank {rank} of {size}: {after} thread {thread:?} panicked"
        ));
    }));
}
