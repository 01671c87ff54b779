//! Storages of tensors: wrapped into a tensor, copied, or taken out of one.

use crate::base::error::{Error, Result, internal};
use crate::base::sync::lock;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, InplaceOp1, Layout, Shape, Storage, Tensor};
use std::sync::{Mutex, PoisonError};

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

pub(crate) fn check_len(storage: &Storage, shape: &Shape) -> Result<()> {
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

/// The values of `x` in a new storage, contiguous from its start.
pub(crate) fn owned_storage(x: &Tensor) -> Result<Storage> {
    let x = if fills_its_storage(x) {
        x.clone()
    } else {
        x.force_contiguous()?
    };
    let (storage, layout) = x.storage_and_layout();
    Ok(storage.try_clone(layout)?)
}

/// Whether `x` covers its storage exactly.
fn fills_its_storage(x: &Tensor) -> bool {
    let (storage, layout) = x.storage_and_layout();
    let len = match &*storage {
        Storage::Cpu(storage) => cpu_len(storage),
        // Other storages copy by layout, and may be longer.
        _ => Some(x.elem_count()),
    };
    layout.is_contiguous() && layout.start_offset() == 0 && len == Some(x.elem_count())
}

/// [`owned_storage`] without a copy, if `x` covers its storage. The caller has just computed `x`, so no other tensor shares
/// the storage, which `x` loses.
pub(crate) fn take_storage(x: Tensor) -> Result<Storage> {
    // candle refuses in-place writes with a stride of 0, which a tensor without elements may have.
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

/// Takes the storage of a tensor and leaves an empty one.
#[derive(Default)]
struct Taken(Mutex<Option<Storage>>);

impl Taken {
    fn put(&self, storage: Storage) {
        *lock(&self.0) = Some(storage);
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
            let copy = tensor_of(owned_storage(&view)?, view.shape())?;
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
            let taken = tensor_of(take_storage(view(new()?)?)?, shape.shape())?;
            assert_eq!(taken.to_vec2::<f32>()?, expected);
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
            let error = tensor_of(storage(), shape.as_slice())
                .unwrap_err()
                .to_string();
            let expected = format!("{values} values does not make a tensor of shape {shape:?}");
            assert!(error.contains(&expected), "{error}");
        }
        let empty = tensor_of(Storage::Cpu(CpuStorage::BF16(vec![])), (3, 0))?;
        assert_eq!(empty.dims(), [3, 0]);
        Ok(())
    }
}
