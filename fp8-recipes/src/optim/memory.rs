//! Memory of tensors.

use candle_core::{Storage, Tensor};

/// The address of a tensor's storage: equal for tensors that share memory.
pub(super) fn address(tensor: &Tensor) -> usize {
    std::ptr::from_ref::<Storage>(&tensor.storage_and_layout().0) as usize
}
