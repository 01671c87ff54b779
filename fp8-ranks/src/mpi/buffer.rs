//! Memory of tensors that MPI reads and writes.

use crate::error::Failure;
use candle_core::{CpuStorage, DType, Device, Storage, StorageRef, Tensor};
use std::ffi::c_void;

/// Calls a macro with the vector of a storage, whatever its type.
macro_rules! vector {
    ($storage:expr, $data:ident => $result:expr, $other:expr) => {
        match $storage {
            CpuStorage::U8($data) => $result,
            CpuStorage::U32($data) => $result,
            CpuStorage::I16($data) => $result,
            CpuStorage::I32($data) => $result,
            CpuStorage::I64($data) => $result,
            CpuStorage::BF16($data) => $result,
            CpuStorage::F16($data) => $result,
            CpuStorage::F32($data) => $result,
            CpuStorage::F64($data) => $result,
            CpuStorage::F8E4M3($data) => $result,
            _ => $other,
        }
    };
}

/// Addresses that stand for no elements. A slice without elements has any address, and some mean something to MPI: for Open MPI
/// that of an empty vector of bytes, 1, is `MPI_IN_PLACE`. Two, because what is sent must not be where something is received.
static NO_SOURCE: u64 = 0;
static NO_TARGET: u64 = 0;

fn refused(got: DType) -> Failure {
    Failure::DType {
        got,
        expected: "U8, U32, I16, I32, I64, BF16, F16, F32, F64 or F8E4M3",
    }
}

/// A tensor on the CPU whose elements stay where they are, unchanged: a variable cannot be set before this is dropped.
pub(super) struct Source {
    /// Borrows from `tensor`, and is dropped before it.
    storage: StorageRef<'static>,
    tensor: Tensor,
}

impl Source {
    /// The elements of a contiguous tensor on the CPU.
    pub(super) fn new(tensor: Tensor) -> Self {
        // SAFETY: the storage is behind an `Arc` that `tensor` holds, so it neither moves nor ends before `tensor` does, which
        // this value keeps until after the guard (fields are dropped in order). The guard is not handed out.
        let storage = unsafe {
            std::mem::transmute::<StorageRef<'_>, StorageRef<'static>>(
                tensor.storage_and_layout().0,
            )
        };
        Self { storage, tensor }
    }

    /// Element `at`, which is one of the tensor's or the end of them.
    pub(super) fn at(&self, at: usize) -> Result<*const c_void, Failure> {
        let begin = self.tensor.layout().start_offset();
        let Storage::Cpu(storage) = &*self.storage else {
            return Err(refused(self.tensor.dtype()));
        };
        let pointer = vector!(
            storage,
            data => match &data[begin + at..] {
                [] => (&raw const NO_SOURCE).cast(),
                elements => elements.as_ptr().cast(),
            },
            return Err(refused(self.tensor.dtype()))
        );
        Ok(pointer)
    }
}

/// New memory for a result.
pub(super) struct Target(CpuStorage);

impl Target {
    /// So many zeros.
    pub(super) fn zeros(dtype: DType, len: usize) -> Result<Self, Failure> {
        let storage = match dtype {
            DType::U8 => CpuStorage::U8(vec![0; len]),
            DType::U32 => CpuStorage::U32(vec![0; len]),
            DType::I16 => CpuStorage::I16(vec![0; len]),
            DType::I32 => CpuStorage::I32(vec![0; len]),
            DType::I64 => CpuStorage::I64(vec![0; len]),
            DType::BF16 => CpuStorage::BF16(vec![Default::default(); len]),
            DType::F16 => CpuStorage::F16(vec![Default::default(); len]),
            DType::F32 => CpuStorage::F32(vec![0.0; len]),
            DType::F64 => CpuStorage::F64(vec![0.0; len]),
            DType::F8E4M3 => CpuStorage::F8E4M3(vec![Default::default(); len]),
            other => return Err(refused(other)),
        };
        Ok(Self(storage))
    }

    /// The elements of a contiguous tensor on the CPU, copied.
    pub(super) fn copied(tensor: &Tensor) -> Result<Self, Failure> {
        let (storage, layout) = tensor.storage_and_layout();
        let begin = layout.start_offset();
        let range = begin..begin + tensor.elem_count();
        match &*storage {
            Storage::Cpu(storage) => Ok(Self(match storage {
                CpuStorage::U8(data) => CpuStorage::U8(data[range].to_vec()),
                CpuStorage::U32(data) => CpuStorage::U32(data[range].to_vec()),
                CpuStorage::I16(data) => CpuStorage::I16(data[range].to_vec()),
                CpuStorage::I32(data) => CpuStorage::I32(data[range].to_vec()),
                CpuStorage::I64(data) => CpuStorage::I64(data[range].to_vec()),
                CpuStorage::BF16(data) => CpuStorage::BF16(data[range].to_vec()),
                CpuStorage::F16(data) => CpuStorage::F16(data[range].to_vec()),
                CpuStorage::F32(data) => CpuStorage::F32(data[range].to_vec()),
                CpuStorage::F64(data) => CpuStorage::F64(data[range].to_vec()),
                CpuStorage::F8E4M3(data) => CpuStorage::F8E4M3(data[range].to_vec()),
                _ => return Err(refused(tensor.dtype())),
            })),
            _ => Err(refused(tensor.dtype())),
        }
    }

    /// Element `at`, which is one of them or their end.
    pub(super) fn at(&mut self, at: usize) -> *mut c_void {
        vector!(
            &mut self.0,
            data => match &mut data[at..] {
                [] => (&raw const NO_TARGET).cast_mut().cast(),
                elements => elements.as_mut_ptr().cast(),
            },
            unreachable!("not made by `zeros` or `copied`")
        )
    }

    /// Copies `len` elements of `from`, which has the same dtype.
    pub(super) fn copy(&mut self, at: usize, from: &Self, begin: usize, len: usize) {
        macro_rules! copy {
            ($($dtype:ident)*) => {
                match (&mut self.0, &from.0) {
                    $((CpuStorage::$dtype(to), CpuStorage::$dtype(from)) => {
                        to[at..at + len].copy_from_slice(&from[begin..begin + len]);
                    })*
                    _ => unreachable!("another dtype"),
                }
            };
        }
        copy!(U8 U32 I16 I32 I64 BF16 F16 F32 F64 F8E4M3);
    }

    /// All elements as a tensor, without a copy.
    pub(super) fn into_tensor(self) -> Result<Tensor, Failure> {
        let tensor = vector!(
            self.0,
            data => { let len = data.len(); Tensor::from_vec(data, len, &Device::Cpu) },
            unreachable!("not made by `zeros` or `copied`")
        );
        Ok(tensor?)
    }
}
