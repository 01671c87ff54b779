//! Zeroed cells for amaxes that casts measure: one allocation and one memset for many casts.

use super::gpu::Gpu;
use crate::base::error::Result;
use candle_core::cuda_backend::DeviceId;
use candle_core::{DType, Tensor};
use std::cell::RefCell;

/// Casts that one allocation serves; a layer has six casts in a training step.
const CELLS: usize = 1024;

/// Memory whose first `used` cells are in use. It lives until the last amax in it is dropped.
struct Arena {
    device: DeviceId,
    cells: Tensor,
    used: usize,
}

thread_local! {
    /// The arena of the device that this thread used last. A static would keep every device open that a program has opened.
    static ARENA: RefCell<Option<Arena>> = const { RefCell::new(None) };
}

/// Lets go of the arena, so that the next cell is in memory that is zeroed then.
pub(super) fn forget() {
    ARENA.take();
}

/// f32 `[1]`, 0, which nothing else reads or writes.
pub(super) fn zeroed_cell(gpu: &Gpu) -> Result<Tensor> {
    ARENA.with_borrow_mut(|arena| {
        let device = gpu.device().id();
        let old = arena
            .take()
            .filter(|arena| arena.device == device && arena.used < CELLS);
        let now = match old {
            Some(arena) => arena,
            None => Arena {
                device,
                cells: gpu.zero_tensor(DType::F32, CELLS)?,
                used: 0,
            },
        };
        let arena = arena.insert(now);
        let cell = arena.cells.narrow(0, arena.used, 1)?;
        arena.used += 1;
        Ok(cell)
    })
}
