//! Ranks as threads of one process: the double for tests, with the same results as processes to the bit.
//!
//! It checks what no other engine checks: that all ranks call the same operation with sizes that fit. If not, all of them get one
//! [`crate::Failure::Mismatch`] with what each has called. A rank that fails, panics, returns or drops its groups while others wait for
//! it, or comes too late breaks the job for all at once. One that returns when no other needs it breaks nothing, whether with a value or
//! an error; [`crate::ProcessGroup::give_up`] tells the others why.
//!
//! A rank ends by returning. It may call [`finish()`] before, as a process calls
//! [`crate::World::finish`]: then ranks that did not make the same calls all get an error.
//!
//! Every rank is a thread of its own (no rayon worker: a rank that waits would block others).

mod engine;
mod fault;
mod finish;
mod hub;
mod round;
mod run;

pub use fault::Fault;
pub use finish::finish;
pub use run::{Threads, run};
