//! A forward result that is computed before its autograd node exists.
//!
//! candle's custom ops compute inside `cpu_fwd` or `cuda_fwd`, on raw storages. Here results come from code that works on
//! tensors of any device, and the node's forward pass only hands them over.

use crate::error::{Error, Result, internal};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, InplaceOp1, Layout, Shape, Storage, Tensor};
use std::sync::{Mutex, PoisonError};

/// One result, to be taken once.
pub(crate) struct Ready {
    storage: Mutex<Option<Storage>>,
    shape: Shape,
}

impl Ready {
    /// # Errors
    /// If `storage` does not hold the values of `shape`.
    pub(crate) fn new(storage: Storage, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        check_len(&storage, &shape)?;
        Ok(Self {
            storage: Mutex::new(Some(storage)),
            shape,
        })
    }

    fn take(&self) -> Option<Storage> {
        self.storage
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    pub(crate) fn take_cpu(&self) -> candle_core::Result<(CpuStorage, Shape)> {
        match self.take() {
            Some(Storage::Cpu(storage)) => Ok((storage, self.shape.clone())),
            _ => {
                candle_core::bail!("the result of this node is not on the CPU or was taken before")
            }
        }
    }

    pub(crate) fn take_cuda(&self) -> candle_core::Result<(CudaStorage, Shape)> {
        match self.take() {
            Some(Storage::Cuda(storage)) => Ok((storage, self.shape.clone())),
            _ => candle_core::bail!("the result of this node is not on CUDA or was taken before"),
        }
    }

    /// The result as a tensor outside any graph.
    pub(crate) fn into_tensor(self) -> Result<Tensor> {
        match self.take() {
            Some(storage) => tensor_of(storage, self.shape),
            None => internal!("the result of this node was taken before"),
        }
    }
}

/// A detached tensor that owns `storage`.
///
/// # Errors
/// If `storage` does not hold the values of `shape`: candle does not check, and its kernels read what the shape says.
pub(crate) fn tensor_of(storage: Storage, shape: impl Into<Shape>) -> Result<Tensor> {
    let shape = shape.into();
    check_len(&storage, &shape)?;
    Ok(Tensor::from_storage(
        storage,
        shape,
        BackpropOp::none(),
        false,
    ))
}

fn check_len(storage: &Storage, shape: &Shape) -> Result<()> {
    let fits = |len: usize| match storage {
        Storage::Cpu(_) => len == shape.elem_count(),
        // A device allocation may be longer.
        _ => len >= shape.elem_count(),
    };
    match len(storage) {
        Some(len) if !fits(len) => Err(Error::Elements {
            shape: shape.dims().to_vec(),
            got: len,
        }),
        _ => Ok(()),
    }
}

/// Values in a storage, if that is known.
fn len(storage: &Storage) -> Option<usize> {
    match storage {
        Storage::Cpu(storage) => cpu_len(storage),
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => cuda_len(storage),
        _ => None,
    }
}

#[cfg(feature = "cuda")]
fn cuda_len(storage: &CudaStorage) -> Option<usize> {
    use candle_core::cuda_backend::CudaStorageSlice;
    match &storage.slice {
        CudaStorageSlice::U8(values) => Some(values.len()),
        CudaStorageSlice::F32(values) => Some(values.len()),
        CudaStorageSlice::BF16(values) => Some(values.len()),
        CudaStorageSlice::F16(values) => Some(values.len()),
        CudaStorageSlice::F64(values) => Some(values.len()),
        _ => None,
    }
}

/// The values of `x` in a storage of their own, contiguous from its start.
pub(crate) fn owned_storage(x: &Tensor) -> Result<Storage> {
    let x = if fills_its_storage(x) {
        x.clone()
    } else {
        x.force_contiguous()?
    };
    let (storage, layout) = x.storage_and_layout();
    Ok(storage.try_clone(layout)?)
}

/// Whether a storage of `x` alone would be the same.
fn fills_its_storage(x: &Tensor) -> bool {
    let (storage, layout) = x.storage_and_layout();
    let len = match &*storage {
        Storage::Cpu(storage) => cpu_len(storage),
        // Other storages copy by layout, and may be longer.
        _ => Some(x.elem_count()),
    };
    layout.is_contiguous() && layout.start_offset() == 0 && len == Some(x.elem_count())
}

/// As [`owned_storage`], without a copy where `x` is contiguous from the start of its memory. The caller has just computed `x`:
/// no other tensor shares its memory, which is gone from `x` afterwards.
pub(crate) fn take_storage(x: Tensor) -> Result<Storage> {
    // candle refuses to write in place where a stride is 0, as it is beside a size of 0.
    if !fills_its_storage(&x) || x.elem_count() == 0 {
        return owned_storage(&x);
    }
    let taken = Taken::default();
    x.inplace_op1(&taken)?;
    let taken = taken.0.into_inner().unwrap_or_else(PoisonError::into_inner);
    match taken {
        Some(storage) => Ok(storage),
        None => internal!("a tensor on {:?} gave no storage", x.device().location()),
    }
}

/// Puts nothing in the place of a tensor's memory.
#[derive(Default)]
struct Taken(Mutex<Option<Storage>>);

impl Taken {
    fn put(&self, storage: Storage) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(storage);
    }
}

impl InplaceOp1 for Taken {
    fn name(&self) -> &'static str {
        "take"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        self.put(Storage::Cpu(std::mem::replace(
            storage,
            CpuStorage::U8(vec![]),
        )));
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> candle_core::Result<()> {
        use candle_core::backend::{BackendDevice, BackendStorage};
        // SAFETY: nothing reads it.
        let nothing = unsafe {
            storage
                .device()
                .alloc_uninit(&Shape::from(1), candle_core::DType::U8)
        }?;
        self.put(Storage::Cuda(std::mem::replace(storage, nothing)));
        Ok(())
    }
}

fn cpu_len(storage: &CpuStorage) -> Option<usize> {
    match storage {
        CpuStorage::U8(values) => Some(values.len()),
        CpuStorage::U32(values) => Some(values.len()),
        CpuStorage::F8E4M3(values) => Some(values.len()),
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
            let copy = Ready::new(owned_storage(&view)?, view.shape())?.into_tensor()?;
            assert_eq!(copy.to_vec2::<f32>()?, view.to_vec2::<f32>()?);
        }
        assert_eq!(x.dtype(), DType::F32);
        Ok(())
    }

    #[test]
    fn memory_is_taken_only_from_a_tensor_that_fills_it() -> Result<()> {
        let new = || Tensor::arange(0f32, 24., &Device::Cpu)?.reshape((4, 6));
        let views: [fn(Tensor) -> candle_core::Result<Tensor>; 4] =
            [Ok, |x| x.narrow(0, 1, 2), |x| x.narrow(0, 0, 2), |x| x.t()];
        for view in views {
            let (expected, shape) = (view(new()?)?.to_vec2::<f32>()?, view(new()?)?);
            let taken = Ready::new(take_storage(view(new()?)?)?, shape.shape())?;
            assert_eq!(taken.into_tensor()?.to_vec2::<f32>()?, expected);
        }
        let x = new()?;
        let address = |x: &Tensor| match &*x.storage_and_layout().0 {
            Storage::Cpu(CpuStorage::F32(values)) => values.as_ptr(),
            _ => std::ptr::null(),
        };
        let before = address(&x);
        let taken = tensor_of(take_storage(x)?, (4, 6))?;
        assert_eq!(address(&taken), before, "nothing was copied");
        Ok(())
    }

    #[test]
    fn a_storage_has_as_many_values_as_its_shape() -> Result<()> {
        for (values, shape) in [
            (0, vec![3, 5]),
            (14, vec![3, 5]),
            (16, vec![3, 5]),
            (1, vec![0]),
        ] {
            let storage = || Storage::Cpu(CpuStorage::F32(vec![0.; values]));
            let ready = Ready::new(storage(), shape.as_slice()).map(|_| ());
            let tensor = tensor_of(storage(), shape.as_slice()).map(|_| ());
            for result in [ready, tensor] {
                let error = result.unwrap_err().to_string();
                let expected = format!("{values} values does not make a tensor of shape {shape:?}");
                assert!(error.contains(&expected), "{error}");
            }
        }
        let empty = Ready::new(Storage::Cpu(CpuStorage::BF16(vec![])), (3, 0))?;
        assert_eq!(empty.into_tensor()?.dims(), [3, 0]);
        Ok(())
    }
}
