//! Groups of ranks: processes or threads that train one model together. Collectives on candle's tensors, over engines that exist.
//!
//! - [`ProcessGroup`]: the operations. Sums are in the order of ranks, so results depend neither on the engine nor on how data is
//!   cut into calls.
//! - [`World`]: the processes that `mpirun` has started (feature `mpi`), or one process; how they begin and end.
//! - `nccl`: their GPUs (feature `nccl`; it has run in groups of one GPU only).
//! - [`ShardedVarMap`]: parameters of which each rank holds a part.
//! - [`DeviceMesh`]: ranks in a grid with named axes.
//! - [`threads`]: ranks as threads of one process, for tests.

#![doc(test(attr(deny(warnings))))]

mod engine;
mod error;
mod failure;
pub mod graph;
mod group;
mod launcher;
mod mesh;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
pub mod nccl;
mod sharded;
mod single;
mod sum;
pub mod threads;
mod traffic;
mod world;

pub use engine::{Call, Collective, Engine, Pending};
pub use error::{Error, Failure, Operation, Result};
pub use failure::EXIT_CODE;
pub use group::{GroupOptions, ProcessGroup, Started};
pub use launcher::Announced;
pub use mesh::DeviceMesh;
pub use sharded::{
    BLOCK, Layout, ShardedVar, ShardedVarMap, precompute_float8_dynamic_scale_for_fsdp,
};
pub use single::Single;
pub use sum::{ReduceOp, SumOrder};
pub use traffic::{Sent, Traffic};
pub use world::{World, WorldOptions};

/// What delayed scaling asks for; [`ProcessGroup`] is one.
pub use fp8_candle::state::ReductionGroup;
