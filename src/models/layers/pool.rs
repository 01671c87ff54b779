//! Where a forward pass runs.

use crate::is_guard_open;
use candle_core::Device;

/// Runs `f` on a worker of the rayon pool, if it computes on the CPU.
///
/// From any other thread each parallel operation of a model wakes and awaits workers, which then contend with that thread for
/// the cores: a third more time for a prompt on two of them. A guard is bound to its thread, so under one `f` stays there.
pub(crate) fn in_pool<R: Send>(device: &Device, f: impl FnOnce() -> R + Send) -> R {
    match device.is_cpu() && !is_guard_open() {
        true => rayon::scope(|_| f()),
        false => f(),
    }
}
