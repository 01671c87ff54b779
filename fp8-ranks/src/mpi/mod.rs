//! Processes on CPUs, over MPI.
//!
//! One thread starts MPI, owns every communicator and makes every call (`MPI_THREAD_FUNNELED` suffices). The others send it
//! jobs. It starts collectives without blocking and tests them in turn, because MPI makes no progress without calls; so several
//! can be under way, and a rank that waits can stop waiting at its deadline.
//!
//! What ranks call is not compared, but ranks that wait tell each other where they are (`roll_call.rs`): one that has come to its end
//! notices that another waits for it.
//!
//! The crate `mpi` ignores what MPI's functions return, so its bindings are used, and every code is checked.

mod buffer;
mod engine;
mod library;
mod numbered;
mod owner;
mod roll_call;
mod transfer;

pub(crate) use engine::join;
