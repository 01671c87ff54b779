//! Small arrays on a GPU that rarely change, kept by their values: copying them from the host in every step would cost a call
//! each, and would not be possible while a CUDA graph is recorded.

use super::gpu::Gpu;
use super::recording::keep;
use crate::base::error::Result;
use crate::base::sync::lock;
use candle_core::cuda_backend::DeviceId;
use candle_core::{Tensor, WithDType};
use std::collections::HashMap;
use std::sync::Mutex;

/// The most arrays that are kept; a program with more of them changes them in every step.
const MOST: usize = 256;

/// A device with its own stream, the dtype and the bits of the values. What is kept is never written.
type Key = (DeviceId, &'static str, Vec<u8>);

static KEPT: Mutex<Option<HashMap<Key, Tensor>>> = Mutex::new(None);

/// A tensor of `values`, the one that an earlier call with the same values has made.
pub(super) fn constant<T: WithDType>(gpu: &Gpu, values: &[T]) -> Result<Tensor> {
    if T::DTYPE.size_in_bytes() > 4 {
        // Their bits may not go through an f64.
        return gpu.upload(values);
    }
    let bits = values.iter().flat_map(|value| value.to_f64().to_le_bytes());
    let key = (gpu.device().id(), T::DTYPE.as_str(), bits.collect());
    if let Some(kept) = lock(&KEPT).as_ref().and_then(|kept| kept.get(&key)) {
        // This map may let go of it while the graph still reads it.
        keep(gpu.device().id(), kept);
        return Ok(kept.clone());
    }
    let made = gpu.upload(values)?;
    let mut kept = lock(&KEPT);
    let kept = kept.get_or_insert_default();
    if kept.len() >= MOST {
        kept.clear();
    }
    kept.insert(key, made.clone());
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_are_copied_once() -> Result<()> {
        let device = fp8_test_support::device();
        if !device.is_cuda() {
            println!("skipped: no CUDA device");
            return Ok(());
        }
        let gpu = Gpu::new(&device)?;
        let first = constant(&gpu, &[1f32, 2.5])?;
        assert_eq!(first.id(), constant(&gpu, &[1f32, 2.5])?.id());
        assert_eq!(first.to_vec1::<f32>()?, [1., 2.5]);
        // Other values, another dtype.
        assert_eq!(constant(&gpu, &[1f32, -2.5])?.to_vec1::<f32>()?, [1., -2.5]);
        assert_eq!(constant(&gpu, &[1u32, 2])?.to_vec1::<u32>()?, [1, 2]);
        assert_eq!(constant(&gpu, &[1u8, 2])?.to_vec1::<u8>()?, [1, 2]);
        Ok(())
    }
}
