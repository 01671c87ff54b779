//! Ranks with a GPU each, over NCCL. It has run with one GPU; **with several it is unverified**.
//!
//! NCCL needs a way to find the other ranks, so a group on GPUs is made [`over`] a group that exists: the processes of
//! [`crate::World`]. That group also takes what NCCL does not: tensors on the CPU, barriers, splits.
//!
//! Collectives are queued on candle's own stream of the device, where they are in order with the kernels before and after them
//! and do not overlap with them. Maxima are those of u32, as everywhere in this crate; NCCL's own sum depends on its algorithm
//! ([`crate::SumOrder::Engine`]). Dtypes: U8, U32, I64, F16, BF16, F32, F64.

mod communicator;
mod engine;
#[cfg(test)]
mod tests;

use crate::error::{Error, Operation, Result};
use crate::group::ProcessGroup;
use candle_core::Device;
use std::sync::Arc;

/// A group of the same ranks as `host` for tensors on `device`, which is this rank's own GPU. All ranks call it; a rank that does
/// not leaves the others waiting in NCCL, without a deadline.
///
/// # Errors
/// A device that is not a CUDA device, and whatever NCCL says.
pub fn over(host: &ProcessGroup, device: &Device, name: &str) -> Result<ProcessGroup> {
    let options = host.options();
    let group: Arc<str> = name.into();
    let connected = engine::connect(host.engine_of_group(), device, &group, options.deadline);
    match connected {
        Ok(engine) => host.with_engine(engine, name),
        Err(failure) => {
            let error = Error::Collective {
                rank: host.rank(),
                size: host.size(),
                group,
                operation: Operation::Split,
                failure,
            };
            Err(host.give_up(error))
        }
    }
}
