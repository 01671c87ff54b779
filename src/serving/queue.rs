//! Waiting requests, between the callers' threads and the server's.

use super::error::ServingError;
use super::request::Request;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// What a server is doing at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerLoad {
    /// Requests that are waiting for their turn.
    pub waiting: usize,
    /// Requests that are being computed.
    pub running: usize,
    /// Bytes counted for the caches of running requests, see [`ServerOptions::max_cache_bytes`](super::ServerOptions::max_cache_bytes).
    pub cache_bytes: usize,
}

/// Whether a server takes requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Yes.
    Open,
    /// No; it ends once it has answered the requests that it has.
    Draining,
    /// No; it ends now.
    Closed,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) waiting: VecDeque<Request>,
    pub(super) phase: Phase,
    /// Requests that run, and the bytes counted for their caches.
    pub(super) running: (usize, usize),
}

impl State {
    fn check_open(&self) -> Result<(), ServingError> {
        match self.phase {
            Phase::Open => Ok(()),
            Phase::Draining | Phase::Closed => Err(ServingError::ShutDown),
        }
    }

    /// Ends the waiting requests that were cancelled.
    pub(super) fn drop_cancelled(&mut self) {
        self.waiting.retain_mut(|request| {
            let cancelled = request.outlet.is_cancelled();
            if cancelled {
                request.stop();
            }
            !cancelled
        });
    }
}

/// The queue of a server.
#[derive(Debug)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

impl Queue {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::new(State {
                waiting: VecDeque::new(),
                phase: Phase::Open,
                running: (0, 0),
            }),
            changed: Condvar::new(),
        }
    }

    /// Locks the state for a moment: no model runs under this lock, and a panic leaves nothing half-done.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails if the server takes no more requests.
    pub(super) fn check_open(&self) -> Result<(), ServingError> {
        self.lock().check_open()
    }

    /// Adds a request, unless `most` are waiting already.
    pub(super) fn push(&self, request: Request, most: usize) -> Result<(), ServingError> {
        let mut state = self.lock();
        state.check_open()?;
        if state.waiting.len() >= most {
            state.drop_cancelled();
        }
        let waiting = state.waiting.len();
        if waiting >= most {
            return Err(ServingError::QueueFull { waiting });
        }
        state.waiting.push_back(request);
        self.changed.notify_all();
        Ok(())
    }

    /// Waits until there is a request or the server has to end.
    pub(super) fn wait(&self) {
        let idle = |state: &mut State| state.waiting.is_empty() && state.phase == Phase::Open;
        drop(
            self.changed
                .wait_while(self.lock(), idle)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }

    /// Takes no more requests. A closed queue does not open again.
    pub(super) fn end(&self, phase: Phase) {
        let mut state = self.lock();
        if state.phase != Phase::Closed {
            state.phase = phase;
        }
        self.changed.notify_all();
    }
}
