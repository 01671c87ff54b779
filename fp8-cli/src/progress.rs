//! Progress on stderr, and requests to stop.

use crate::requests::{Request, on_request};
use crate::shown;
use anyhow::Result;
use fp8::rewrite::Progress;
use std::ops::ControlFlow;
use std::sync::{Once, OnceLock};

/// The first request of the system to stop.
static REQUEST: OnceLock<Request> = OnceLock::new();

/// The request of the system to stop, if one has come since the first bar was made.
pub fn request() -> Option<Request> {
    REQUEST.get().copied()
}

/// Units of work that is counted in bytes.
pub const BYTES: &str = "{bytes}/{total_bytes}";
/// Units of other work.
pub const COUNT: &str = "{pos}/{len}";

/// A progress bar.
pub struct Bar(shown::Progress);

impl Bar {
    /// A bar for `what` in `units`. From now on Ctrl-C and SIGTERM stop at the next layer, and a second one at once.
    pub fn new(what: &'static str, units: &str) -> Result<Self> {
        // A command may show several bars; the handler is set once.
        static HANDLER: Once = Once::new();
        let mut set = Ok(());
        HANDLER.call_once(|| {
            set = on_request(|request| {
                if REQUEST.set(request).is_err() {
                    std::process::exit(request.code().into());
                }
            });
        });
        set?;
        Ok(Self(shown::Progress::new(what, units)?))
    }

    /// The callback of the rewriting functions.
    pub fn show(&mut self, progress: Progress<'_>) -> ControlFlow<()> {
        self.at(progress.name, progress.done, progress.total)
    }

    /// Shows `done` of `total`, with `name` next.
    pub fn at(&mut self, name: &str, done: u64, total: u64) -> ControlFlow<()> {
        self.0.show(done, total, name);
        match request() {
            Some(_) => ControlFlow::Break(()),
            None => ControlFlow::Continue(()),
        }
    }
}
