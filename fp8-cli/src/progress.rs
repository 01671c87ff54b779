//! Progress on stderr, and requests to stop.

use crate::requests::on_request;
use crate::shown;
use anyhow::Result;
use fp8::rewrite::Progress;
use std::ops::ControlFlow;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the system has asked to stop.
static STOPPED: AtomicBool = AtomicBool::new(false);

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
                if STOPPED.swap(true, Ordering::Relaxed) {
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
        match STOPPED.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }
}
