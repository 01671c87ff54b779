//! FP8 GEMM on the host: on bf16 units where the processor has them (`blocked.rs`), else on f32 ones (`slab.rs`).

mod epilogue;
mod layout;
mod scratch;
mod shared;
mod side;
mod slab;

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod bf16;
#[cfg(target_arch = "x86_64")]
mod blocked;
#[cfg(target_arch = "x86_64")]
mod kernel;
#[cfg(target_arch = "x86_64")]
mod pack;

#[cfg(test)]
mod tests;

use crate::device::{GemmOperand, GemmOutput};
use crate::error::Error;
use candle_core::{CpuStorage, DType, Result};
use fp8_core::{HighPrecision, Isa};
use side::{Side, with_side};
use std::mem::MaybeUninit;

pub(super) use layout::{pack_codes, unpack_codes};

/// Whether this processor streams weights from packed codes.
pub(super) fn takes_packed(isa: Isa) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        kernel::Engine::of(isa).is_some()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = isa;
        false
    }
}

/// `[a.kept, b.kept]`, see [`crate::device::Backend::gemm`].
pub(super) fn gemm(
    isa: Isa,
    a: &GemmOperand<'_>,
    b: &GemmOperand<'_>,
    out: &GemmOutput<'_>,
) -> Result<CpuStorage> {
    let bias = match out.bias {
        None => None,
        Some(bias) => Some(
            bias.to_dtype(out.dtype)?
                .to_dtype(DType::F32)?
                .to_vec1::<f32>()?,
        ),
    };
    let bias = bias.as_deref();
    with_side(a, |a| {
        with_side(b, |b| {
            Ok(match out.dtype {
                DType::F32 => CpuStorage::F32(multiply(isa, a, b, bias)),
                DType::BF16 => CpuStorage::BF16(multiply(isa, a, b, bias)),
                DType::F16 => CpuStorage::F16(multiply(isa, a, b, bias)),
                DType::F64 => CpuStorage::F64(multiply(isa, a, b, bias)),
                got => {
                    return Err(Error::DType {
                        op: "fp8 gemm",
                        what: "the output",
                        expected: "f32, bf16, f16 or f64",
                        got,
                    }
                    .into());
                }
            })
        })
    })
}

fn multiply<T: HighPrecision>(
    isa: Isa,
    a: &Side<'_>,
    b: &Side<'_>,
    bias: Option<&[f32]>,
) -> Vec<T> {
    let len = a.kept() * b.kept();
    let mut values = Vec::<T>::with_capacity(len);
    let out: &mut [MaybeUninit<T>] = &mut values.spare_capacity_mut()[..len];
    #[cfg(target_arch = "x86_64")]
    let done = kernel::Engine::of(isa)
        .filter(|_| blocked::handles(a, b))
        .map(|engine| blocked::gemm(engine, a, b, bias, out))
        .is_some();
    #[cfg(not(target_arch = "x86_64"))]
    let done = false;
    if !done {
        slab::gemm(a, b, bias, out);
    }
    // SAFETY: both GEMMs write every element, or panic.
    unsafe { values.set_len(len) };
    values
}
