//! The one place that tells devices apart. A new backend is a folder beside `cpu/` that implements [`Backend`], and one
//! arm in [`backend`].

mod add;
mod backend;
pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod open;
mod unfold;

pub use crate::base::data::codes::{Codes, GemmCodes, GemmOperand, GemmOutput, Orientation};
pub use crate::base::data::columns::{Columns, Recorded, RowUpdate, Updated};
pub use crate::base::data::scales::{CurrentCast, CurrentScale, ScalePolicy};
pub(crate) use add::{add, add_into};
pub use backend::{AmaxCells, Backend};
pub(crate) use backend::{FusedAttention, MadeCasts, multiply_values};
pub(crate) use cpu::{
    Beside, CodedRows, GroupCodes, Groups, MadeRows, Plain, Stored, encode_rows, filled,
    filled_in_pieces,
};
#[cfg(feature = "cuda")]
pub use cuda::info::{CudaInfo, cuda_info};
#[cfg(feature = "cuda")]
pub use cuda::paths::{GemmPaths, take_gemm_paths};
pub use open::{open_cuda, open_cuda_untracked};
pub(crate) use unfold::Unfolding;

use crate::base::error::{Error, Result};
use candle_core::{DType, Device, Tensor};

/// The backend of a device.
///
/// # Errors
/// If the device has none, or on the CPU if `FP8_ISA` does not name an instruction set that it has.
pub fn backend(device: &Device) -> Result<&'static dyn Backend> {
    match device {
        Device::Cpu => {
            crate::base::simd::check()?;
            Ok(&cpu::CpuBackend)
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => Ok(&cuda::CudaBackend),
        other => Err(Error::Device(other.location())),
    }
}

/// Whether the differentiable building blocks have fused forms for `dtype` on `device`.
pub(crate) fn has_fused_ops(device: &Device, dtype: DType) -> bool {
    match device {
        Device::Cpu => true,
        Device::Cuda(_) => cfg!(feature = "cuda") && dtype != DType::F64,
        Device::Metal(_) => false,
    }
}

/// [`Backend::fingerprint`], not profiled as a cast, and without a check of `FP8_ISA`.
pub(crate) fn fingerprint(x: &Tensor) -> Result<Option<u64>> {
    match x.device() {
        Device::Cpu => cpu::fingerprint(x).map(Some),
        device => backend(device)?.fingerprint(x),
    }
}

/// Whether what `device` is asked to do now is recorded, to be done again and again, instead of done once.
pub(crate) fn is_recorded(device: &Device) -> bool {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => cuda::recording::is_recorded(cuda.id()),
        _ => false,
    }
}

/// How `device` unfolds images: with its own kernels, or composed of candle's operations.
pub(crate) fn unfolding(device: &Device) -> &'static dyn Unfolding {
    match device {
        Device::Cpu => &cpu::CpuBackend,
        _ => &unfold::Composed,
    }
}

/// The kernels of `device` that compute a value and cast it at once, if it has any.
pub(crate) fn made_casts(device: &Device) -> Option<&'static dyn MadeCasts> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => Some(&cuda::made::CudaMadeCasts),
        _ => None,
    }
}

/// The attention kernels of `device`, if it has any.
pub(crate) fn fused_attention(device: &Device) -> Option<&'static dyn FusedAttention> {
    match device {
        Device::Cpu => Some(&cpu::CpuAttention),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => Some(&cuda::attention::CudaAttention),
        _ => None,
    }
}
