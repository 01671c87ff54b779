//! The elements of a tensor in host memory: floats, or FP8 codes.

use std::ops::Range;

use candle_core::{CpuStorage, Result, Storage, Tensor, bail};
use fp8_core::Format;
use half::{bf16, f16};

/// Elements that are widened to f32 at a time.
pub(crate) const PIECE: usize = 512;

/// Elements that can be read as f32.
#[derive(Clone, Copy)]
pub(crate) enum Slice<'a> {
    F16(&'a [f16]),
    BF16(&'a [bf16]),
    F32(&'a [f32]),
    F64(&'a [f64]),
    Codes(&'a [u8], Format),
}

impl Slice<'_> {
    /// Calls `f` with the elements of a tensor on the CPU; those of a U8 tensor are codes of `format`.
    pub(crate) fn with<Out>(
        tensor: &Tensor,
        format: Option<Format>,
        f: impl FnOnce(Slice<'_>) -> Out,
    ) -> Result<Out> {
        let tensor = tensor.contiguous()?;
        let (storage, layout) = tensor.storage_and_layout();
        let range = layout.start_offset()..layout.start_offset() + tensor.elem_count();
        let Storage::Cpu(cpu) = &*storage else {
            bail!("expected a tensor on the CPU")
        };
        let slice = match (cpu, format) {
            (CpuStorage::F16(values), None) => Slice::F16(&values[range]),
            (CpuStorage::BF16(values), None) => Slice::BF16(&values[range]),
            (CpuStorage::F32(values), None) => Slice::F32(&values[range]),
            (CpuStorage::F64(values), None) => Slice::F64(&values[range]),
            (CpuStorage::U8(codes), Some(format)) => Slice::Codes(&codes[range], format),
            _ => bail!("a gradient cannot be {:?}", tensor.dtype()),
        };
        Ok(f(slice))
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::F16(values) => values.len(),
            Self::BF16(values) => values.len(),
            Self::F32(values) => values.len(),
            Self::F64(values) => values.len(),
            Self::Codes(codes, _) => codes.len(),
        }
    }

    /// Fetches these elements ahead of their use, as far as there are any.
    pub(crate) fn prefetch(&self, range: Range<usize>) {
        fn part<T>(values: &[T], range: Range<usize>) {
            fp8_core::prefetch(&values[range.start.min(values.len())..range.end.min(values.len())]);
        }
        match self {
            Self::F16(values) => part(values, range),
            Self::BF16(values) => part(values, range),
            Self::F32(values) => part(values, range),
            Self::F64(values) => part(values, range),
            Self::Codes(codes, _) => part(codes, range),
        }
    }

    /// The elements from `start` on, as many as `scratch` has, which holds them where they are not f32 in memory.
    pub(crate) fn widened<'s>(&'s self, start: usize, scratch: &'s mut [f32]) -> &'s [f32] {
        let range = start..start + scratch.len();
        match self {
            Self::F32(values) => return &values[range],
            Self::F16(values) => fp8_core::widen(&values[range], scratch),
            Self::BF16(values) => fp8_core::widen(&values[range], scratch),
            Self::F64(values) => fp8_core::widen(&values[range], scratch),
            Self::Codes(codes, format) => {
                fp8_core::decode(*format, &codes[range], 1.0, scratch);
            }
        }
        scratch
    }
}
