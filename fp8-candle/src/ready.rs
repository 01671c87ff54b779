//! A forward result that exists before its autograd node.
//!
//! candle's custom ops compute inside `cpu_fwd` or `cuda_fwd`, on raw storages. Here results come from code that
//! works on tensors of any device; the node's forward pass only hands them over.

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, Result, Shape, Storage, Tensor, bail};
use std::sync::{Mutex, PoisonError};

/// One result, taken once.
pub(crate) struct Ready {
    storage: Mutex<Option<Storage>>,
    shape: Shape,
}

impl Ready {
    pub(crate) fn new(storage: Storage, shape: impl Into<Shape>) -> Self {
        Self {
            storage: Mutex::new(Some(storage)),
            shape: shape.into(),
        }
    }

    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    fn take(&self) -> Option<Storage> {
        self.storage
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    pub(crate) fn take_cpu(&self) -> Result<(CpuStorage, Shape)> {
        match self.take() {
            Some(Storage::Cpu(storage)) => Ok((storage, self.shape.clone())),
            _ => bail!("the result of this node is not on the CPU or was taken before"),
        }
    }

    pub(crate) fn take_cuda(&self) -> Result<(CudaStorage, Shape)> {
        match self.take() {
            Some(Storage::Cuda(storage)) => Ok((storage, self.shape.clone())),
            _ => bail!("the result of this node is not on CUDA or was taken before"),
        }
    }

    /// The result as a tensor outside any graph.
    pub(crate) fn into_tensor(self) -> Result<Tensor> {
        match self.take() {
            Some(storage) => Ok(Tensor::from_storage(
                storage,
                self.shape,
                BackpropOp::none(),
                false,
            )),
            None => bail!("the result of this node was taken before"),
        }
    }
}

/// The values of `x` in a storage of their own, contiguous from its start.
pub(crate) fn owned_storage(x: &Tensor) -> Result<Storage> {
    let owns_all = {
        let (storage, layout) = x.storage_and_layout();
        let len = match &*storage {
            Storage::Cpu(storage) => cpu_len(storage),
            // Other storages copy by layout.
            _ => Some(x.elem_count()),
        };
        layout.is_contiguous() && layout.start_offset() == 0 && len == Some(x.elem_count())
    };
    let x = if owns_all {
        x.clone()
    } else {
        x.force_contiguous()?
    };
    let (storage, layout) = x.storage_and_layout();
    storage.try_clone(layout)
}

fn cpu_len(storage: &CpuStorage) -> Option<usize> {
    match storage {
        CpuStorage::F32(values) => Some(values.len()),
        CpuStorage::BF16(values) => Some(values.len()),
        CpuStorage::F16(values) => Some(values.len()),
        CpuStorage::F64(values) => Some(values.len()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn views_are_copied_whole() -> Result<()> {
        let x = Tensor::arange(0f32, 24., &Device::Cpu)?.reshape((4, 6))?;
        for view in [
            x.clone(),
            x.narrow(0, 1, 2)?,
            x.narrow(1, 2, 3)?,
            x.t()?,
            x.narrow(0, 0, 2)?,
        ] {
            let copy = Ready::new(owned_storage(&view)?, view.shape()).into_tensor()?;
            assert_eq!(copy.to_vec2::<f32>()?, view.to_vec2::<f32>()?);
        }
        assert_eq!(x.dtype(), DType::F32);
        Ok(())
    }
}
