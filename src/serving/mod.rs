//! Serves one language model to many callers at once.
//!
//! | item | what it is |
//! |---|---|
//! | [`Server`] | takes requests from any thread and computes them together, one token of each at a time |
//! | [`ServerOptions`] | how many requests may run and wait, and how large their caches may be |
//! | [`Reply`] | the pieces of one request's text as they come; dropping it cancels the request |
//! | [`Canceller`] | cancels a request from another thread |
//! | [`ServingError`] | why a request was refused or has ended early |
//!
//! [The guide](crate::guide::serving) goes through them.

mod error;
mod options;
mod queue;
mod reply;
mod request;
mod server;
mod waiting;
mod worker;

pub use error::ServingError;
pub use options::ServerOptions;
pub use queue::ServerLoad;
pub use reply::{Canceller, Piece, Reply};
pub use server::Server;
