//! Which thread begins the step of a model: one of those that use it first.

use crate::error::Result;
use fp8_candle::StateTable;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

/// The tables whose step is about to begin, by address, and the threads that begin it.
#[derive(Debug, Default)]
pub(super) struct Beginnings {
    claimed: Mutex<Vec<Claim>>,
    released: Condvar,
}

type Claim = (usize, ThreadId);

/// The right of this thread to begin the step of a table.
pub(super) struct Beginning<'a> {
    beginnings: &'a Beginnings,
    own: Claim,
}

impl Beginnings {
    fn lock(&self) -> MutexGuard<'_, Vec<Claim>> {
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The right to begin the step of `table`, unless it `is_known`. While another thread has the right, this waits: casts before the
    /// beginning would count as those of the step before.
    pub(super) fn claim(
        &self,
        table: &Arc<StateTable>,
        is_known: impl Fn() -> Result<bool>,
    ) -> Result<Option<Beginning<'_>>> {
        let own = (Arc::as_ptr(table) as usize, thread::current().id());
        let mut claimed = self.lock();
        while !is_known()? {
            match claimed.iter().find(|claim| claim.0 == own.0) {
                // What this thread calls to begin it uses the model.
                Some(claim) if *claim == own => return Ok(None),
                Some(_) => {
                    let waited = self.released.wait(claimed);
                    claimed = waited.unwrap_or_else(PoisonError::into_inner);
                }
                None => {
                    claimed.push(own);
                    let beginnings = self;
                    return Ok(Some(Beginning { beginnings, own }));
                }
            }
        }
        Ok(None)
    }
}

impl Drop for Beginning<'_> {
    fn drop(&mut self) {
        self.beginnings.lock().retain(|claim| *claim != self.own);
        self.beginnings.released.notify_all();
    }
}
