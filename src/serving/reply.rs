//! The channel back to a caller.

use super::error::ServingError;
use super::waiting::wait_for;
use crate::models::FinishReason;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};

/// New text of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Piece {
    /// The new token; None if the request was cancelled.
    pub token: Option<u32>,
    /// The text that is certain with it: whole characters, and nothing that may belong to a stop text. Always empty without a tokenizer.
    pub text: String,
    /// Why this is the last piece; None if more follow. [`FinishReason::Stopped`] after a cancellation.
    pub finish: Option<FinishReason>,
}

/// The pieces of one request, as an iterator that waits for the next one. It ends after a piece with a `finish`, or after an error.
///
/// Dropping it cancels the request.
#[derive(Debug)]
pub struct Reply {
    pieces: Receiver<Result<Piece, ServingError>>,
    canceller: Canceller,
    ended: bool,
}

/// Cancels one request, from any thread. Clones cancel the same request.
#[derive(Debug, Clone, Default)]
pub struct Canceller(Arc<AtomicBool>);

impl Canceller {
    /// Asks the server to end the request after the token that is being computed. Does nothing to a request that has ended.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

impl Reply {
    /// Ends the request early. Pieces that are finished already still arrive, followed by one with [`FinishReason::Stopped`], unless the
    /// request has ended by then.
    pub fn cancel(&self) {
        self.canceller.cancel();
    }

    /// A handle that cancels this request while another thread waits for its pieces.
    pub fn canceller(&self) -> Canceller {
        self.canceller.clone()
    }

    /// Waits for the end: all text, all tokens, and why they ended.
    ///
    /// # Errors
    /// The error that ended the request.
    pub fn wait(self) -> Result<(String, Vec<u32>, FinishReason), ServingError> {
        let (mut text, mut tokens) = (String::new(), vec![]);
        for piece in self {
            let piece = piece?;
            text += &piece.text;
            tokens.extend(piece.token);
            if let Some(finish) = piece.finish {
                return Ok((text, tokens, finish));
            }
        }
        Err(ServingError::ShutDown)
    }
}

impl Iterator for Reply {
    type Item = Result<Piece, ServingError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        // The other side never ends without a last message.
        let gone = || Err(ServingError::ShutDown);
        let piece = wait_for(
            || self.pieces.recv().unwrap_or_else(|_| gone()),
            || match self.pieces.try_recv() {
                Ok(piece) => Some(piece),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => Some(gone()),
            },
        );
        self.ended = !matches!(&piece, Ok(piece) if piece.finish.is_none());
        Some(piece)
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        self.canceller.cancel();
    }
}

/// The server's end of a [`Reply`]. It sends exactly one last message, at the latest when it is dropped.
#[derive(Debug)]
pub(super) struct Outlet {
    pieces: Sender<Result<Piece, ServingError>>,
    canceller: Canceller,
    ended: bool,
}

impl Outlet {
    /// Both ends.
    pub(super) fn new() -> (Self, Reply) {
        let (sender, receiver) = channel();
        let canceller = Canceller::default();
        let outlet = Self {
            pieces: sender,
            canceller: canceller.clone(),
            ended: false,
        };
        let reply = Reply {
            pieces: receiver,
            canceller,
            ended: false,
        };
        (outlet, reply)
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.canceller.is_cancelled()
    }

    pub(super) fn send(&mut self, message: Result<Piece, ServingError>) {
        if self.ended {
            return;
        }
        self.ended = !matches!(&message, Ok(piece) if piece.finish.is_none());
        // A caller that has gone has thereby cancelled the request.
        let _ = self.pieces.send(message);
    }
}

impl Drop for Outlet {
    fn drop(&mut self) {
        self.send(Err(ServingError::ShutDown));
    }
}
