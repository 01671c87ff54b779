//! Reports the progress of a rewrite to a callback, which can cancel it.

use crate::error::{Error, Result};
use std::ops::ControlFlow;

/// The progress of a rewrite.
///
/// ```
/// use fp8_recipes::load::Checkpoint;
/// use fp8_recipes::rewrite::{self, QuantizeOptions, Scheme};
/// use std::ops::ControlFlow;
/// # let dir = tempfile::tempdir()?;
/// # fp8_test_support::files::plain_model(dir.path());
/// let model = Checkpoint::open_dir(dir.path())?;
/// let mut told = vec![];
/// rewrite::quantize(&model, dir.path().join("fp8"), &QuantizeOptions::new(Scheme::ChannelToken), &mut |progress| {
///     told.push(format!("{} of {} bytes", progress.done, progress.total));
///     ControlFlow::Continue(())
/// })?;
/// assert!(told[0].starts_with("0 of "));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Progress<'a> {
    /// The layer or tensor that comes next.
    pub name: &'a str,
    /// Bytes of the layers before it. A few of them may still be worked on.
    pub done: u64,
    /// Bytes of all tensors.
    pub total: u64,
}

impl Progress<'_> {
    /// Calls `on_progress` with this.
    ///
    /// # Errors
    /// [`Error::Cancelled`] if it cancels.
    pub fn report(
        name: &str,
        done: u64,
        total: u64,
        on_progress: &mut OnProgress<'_>,
    ) -> Result<()> {
        match on_progress(Progress { name, done, total }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Error::Cancelled),
        }
    }
}

/// Called before each layer. [`ControlFlow::Break`] cancels: the call then returns [`Error::Cancelled`] and leaves nothing behind.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::load::Checkpoint;
/// use fp8::rewrite::{self, OnProgress, Progress, QuantizeOptions, Scheme};
/// use std::ops::ControlFlow;
/// # let dir = tempfile::tempdir()?;
/// # fp8_test_support::files::plain_model(dir.path());
/// let model = Checkpoint::open_dir(dir.path())?;
/// let cancel: &mut OnProgress<'_> = &mut |_: Progress<'_>| ControlFlow::Break(());
/// let options = QuantizeOptions::new(Scheme::ChannelToken);
/// let outcome = rewrite::quantize(&model, dir.path().join("fp8"), &options, cancel);
/// assert!(matches!(outcome, Err(fp8::FilesError::Cancelled)));
/// assert!(!dir.path().join("fp8").exists());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type OnProgress<'a> = dyn FnMut(Progress<'_>) -> ControlFlow<()> + 'a;

/// A progress callback that shows nothing and never cancels.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::rewrite::{self, Spelling, WriteOptions};
/// use fp8::load::Checkpoint;
/// # fn main() -> Result<(), fp8_recipes::Error> {
/// # if false {
/// let checkpoint = Checkpoint::open_dir("model")?;
/// rewrite::convert(&checkpoint, "out", Spelling::AutoFp8, &WriteOptions::new(), &mut rewrite::quiet)?;
/// # }
/// # Ok(()) }
/// ```
pub fn quiet(_: Progress<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Counts the bytes written.
pub(super) struct Meter<'a, 'b> {
    on_progress: &'a mut OnProgress<'b>,
    done: u64,
    total: u64,
}

impl<'a, 'b> Meter<'a, 'b> {
    pub(super) fn new(on_progress: &'a mut OnProgress<'b>, total: u64) -> Self {
        Self {
            on_progress,
            done: 0,
            total,
        }
    }

    /// Reports what comes next; `bytes` is its size.
    pub(super) fn next(&mut self, name: &str, bytes: u64) -> Result<()> {
        let done = self.done;
        self.done += bytes;
        Progress::report(name, done, self.total, self.on_progress)
    }
}
