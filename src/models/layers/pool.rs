//! Where a forward pass runs.

use crate::is_guard_open;
use candle_core::Device;

/// Runs `f` on a worker of the rayon pool if `device` is the CPU.
///
/// On any other thread each parallel operation wakes workers and waits for them, and they compete with that thread for the cores: a
/// third more time for a prompt on two cores. A guard is bound to its thread, so under an open guard `f` stays there.
pub(crate) fn in_pool<R: Send>(device: &Device, f: impl FnOnce() -> R + Send) -> R {
    match device.is_cpu() && !is_guard_open() {
        true => rayon::scope(|_| f()),
        false => f(),
    }
}
