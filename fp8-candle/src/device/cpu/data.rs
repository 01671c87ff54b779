//! From CPU tensors to slices, and from vectors to tensors: the one place that matches on dtypes.

use crate::base::data::storage::tensor_of;
use crate::base::error::{Error, Result};
use candle_core::{CpuStorage, DType, Shape, Storage, Tensor};
use half::{bf16, f16};

/// The values of a contiguous floating-point tensor.
#[derive(Clone, Copy)]
pub(super) enum Floats<'a> {
    F32(&'a [f32]),
    BF16(&'a [bf16]),
    F16(&'a [f16]),
    F64(&'a [f64]),
}

/// Runs `$body` with `$slice` bound to the typed slice.
macro_rules! for_floats {
    ($floats:expr, $slice:ident => $body:expr) => {
        match $floats {
            $crate::device::cpu::data::Floats::F32($slice) => $body,
            $crate::device::cpu::data::Floats::BF16($slice) => $body,
            $crate::device::cpu::data::Floats::F16($slice) => $body,
            $crate::device::cpu::data::Floats::F64($slice) => $body,
        }
    };
}
pub(super) use for_floats;

/// Calls `f` with the values of `x`, which is made contiguous first.
pub(super) fn with_floats<R>(
    op: &'static str,
    x: &Tensor,
    f: impl FnOnce(Floats<'_>) -> Result<R>,
) -> Result<R> {
    let x = x.contiguous()?;
    let (storage, layout) = x.storage_and_layout();
    let range = layout.start_offset()..layout.start_offset() + x.elem_count();
    let floats = match &*storage {
        Storage::Cpu(CpuStorage::F32(values)) => Floats::F32(&values[range]),
        Storage::Cpu(CpuStorage::BF16(values)) => Floats::BF16(&values[range]),
        Storage::Cpu(CpuStorage::F16(values)) => Floats::F16(&values[range]),
        Storage::Cpu(CpuStorage::F64(values)) => Floats::F64(&values[range]),
        _ => {
            let got = x.dtype();
            return Err(Error::DType {
                op,
                what: "the tensor",
                expected: "f32, bf16, f16 or f64",
                got,
            });
        }
    };
    f(floats)
}

/// Calls `f` with the values of an f32 tensor.
pub(super) fn with_f32<R>(
    op: &'static str,
    x: &Tensor,
    f: impl FnOnce(&[f32]) -> Result<R>,
) -> Result<R> {
    with_floats(op, x, |floats| match floats {
        Floats::F32(values) => f(values),
        _ => Err(Error::DType {
            op,
            what: "a scale",
            expected: "f32",
            got: x.dtype(),
        }),
    })
}

/// Calls `f` with the values of a U8 tensor.
pub(super) fn with_codes<R>(
    op: &'static str,
    x: &Tensor,
    f: impl FnOnce(&[u8]) -> Result<R>,
) -> Result<R> {
    let x = x.contiguous()?;
    let (storage, layout) = x.storage_and_layout();
    match &*storage {
        Storage::Cpu(CpuStorage::U8(codes)) => {
            f(&codes[layout.start_offset()..layout.start_offset() + x.elem_count()])
        }
        _ => Err(Error::DType {
            op,
            what: "codes",
            expected: "u8",
            got: x.dtype(),
        }),
    }
}

/// Calls `f` with the values of a U32 tensor.
pub(super) fn with_u32<R>(
    op: &'static str,
    x: &Tensor,
    f: impl FnOnce(&[u32]) -> Result<R>,
) -> Result<R> {
    let x = x.contiguous()?;
    let (storage, layout) = x.storage_and_layout();
    match &*storage {
        Storage::Cpu(CpuStorage::U32(counts)) => {
            f(&counts[layout.start_offset()..layout.start_offset() + x.elem_count()])
        }
        _ => Err(Error::DType {
            op,
            what: "counts",
            expected: "u32",
            got: x.dtype(),
        }),
    }
}

/// A detached CPU tensor that owns `storage`, which holds the values of `shape`.
pub(super) fn tensor(storage: CpuStorage, shape: impl Into<Shape>) -> Result<Tensor> {
    tensor_of(Storage::Cpu(storage), shape)
}

/// Rounds f32 results to `dtype`.
pub(super) fn narrow(op: &'static str, values: Vec<f32>, dtype: DType) -> Result<CpuStorage> {
    const CHUNK: usize = 1 << 14;
    fn rounded<T: Copy + Send>(values: &[f32], zero: T, round: impl Fn(f32) -> T + Sync) -> Vec<T> {
        let mut out = vec![zero; values.len()];
        let tasks = out.chunks_mut(CHUNK).zip(values.chunks(CHUNK));
        crate::base::parallel::for_each(tasks, |(out, values)| {
            out.iter_mut()
                .zip(values)
                .for_each(|(out, &v)| *out = round(v));
        });
        out
    }
    Ok(match dtype {
        DType::F32 => CpuStorage::F32(values),
        DType::BF16 => CpuStorage::BF16(rounded(&values, bf16::ZERO, bf16::from_f32)),
        DType::F16 => CpuStorage::F16(rounded(&values, f16::ZERO, f16::from_f32)),
        DType::F64 => CpuStorage::F64(values.into_iter().map(f64::from).collect()),
        got => {
            let expected = "f32, bf16, f16 or f64";
            return Err(Error::DType {
                op,
                what: "the output",
                expected,
                got,
            });
        }
    })
}
