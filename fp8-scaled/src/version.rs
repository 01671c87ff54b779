//! Whether the data of a parameter are still those that a value of it was made with.

use super::error::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The data of a parameter until they change. They change in place, under every value that shares them, and the scale that such a
/// value remembers is then not theirs.
#[derive(Debug)]
pub(super) struct Version {
    name: Arc<str>,
    has_ended: AtomicBool,
}

impl Version {
    pub(super) fn new(name: Arc<str>) -> Arc<Self> {
        Arc::new(Self {
            name,
            has_ended: AtomicBool::new(false),
        })
    }

    /// The data have changed.
    pub(super) fn end(&self) {
        self.has_ended.store(true, Ordering::Release);
    }

    /// An error if the data have changed; `op` reads them.
    pub(super) fn check(&self, op: &'static str) -> Result<()> {
        match self.has_ended.load(Ordering::Acquire) {
            false => Ok(()),
            true => Err(Error::ChangedParameter {
                op,
                name: self.name.to_string(),
            }),
        }
    }
}
