//! A forward result that is computed before its autograd node exists; the node's forward pass only hands it over.

use crate::base::data::storage::{check_len, owned_storage, tensor_of};
use crate::base::error::{Result, internal};
use candle_core::{CpuStorage, CudaStorage, Shape, Storage, Tensor};
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

    /// A copy of the values of `x`.
    pub(crate) fn of(x: &Tensor) -> Result<Self> {
        Self::new(owned_storage(x)?, x.shape())
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
