//! Loops over the elements of tensors, for crates that add operations: the loops of this crate's own kernels.
//!
//! Tensors are on the CPU. They are cut by their shapes alone into parts that run in parallel, 16-bit elements are widened to f32 and
//! rounded once at the end, and kernels are compiled for every instruction set. So no bit depends on the number of threads or the
//! processor.

pub use crate::base::data::matrix_dims;
pub use crate::base::math::{Real, max, sum};

use crate::base::data::storage::tensor_of;
use crate::base::error::{Result, internal};
use crate::base::simd::{check, simd};
use crate::device::cpu::elements::{Element, block_rows, compute_dtype};
use crate::device::cpu::elements::{for_dtype, storage, with_slices};
use crate::device::filled;
use candle_core::{DType, Tensor};
use half::{bf16, f16};

/// A function from the rows of `N` tensors to rows of the result.
pub trait RowKernel<const N: usize>: Sync {
    /// Writes `out`, a number of whole rows, from the same rows of the inputs.
    ///
    /// It must be `#[inline(always)]` and call only functions that are: what is not inlined is compiled without vectors.
    fn rows<R: Real>(&self, inputs: [&[R]; N], out: &mut [R]);
}

/// A function from a block of elements to a number, for reductions.
pub trait BlockKernel: Sync {
    /// The number of one block; inlined as [`RowKernel::rows`].
    fn block<R: Real>(&self, elements: &[R]) -> R;
}

/// The dtype in which kernels compute for tensors of `dtype`: f64 for f64, f32 for the others.
pub fn wide_dtype(dtype: DType) -> DType {
    compute_dtype(dtype)
}

/// `kernel` of CPU tensors of one shape and dtype, whose rows have `cols` elements. The result has their shape and dtype.
///
/// # Errors
/// [`Error::DType`](crate::Error::DType) if they are not f32, bf16, f16 or f64; [`Error::Isa`](crate::Error::Isa) if `FP8_ISA` names an
/// instruction set that the processor does not have.
pub fn map_rows<const N: usize>(
    op: &'static str,
    inputs: [&Tensor; N],
    cols: usize,
    kernel: &impl RowKernel<N>,
) -> Result<Tensor> {
    check()?;
    let Some(first) = inputs.first() else {
        internal!("{op}: no tensors");
    };
    for_dtype!(op, first.dtype(), T => mapped::<T, T, N>(inputs, cols, kernel))
}

/// `kernel` of the elements of a CPU tensor in f32, bf16 or f16, rounded once to `dtype`, one of these too.
///
/// # Errors
/// As [`map_rows`].
pub fn map_to(
    op: &'static str,
    x: &Tensor,
    dtype: DType,
    kernel: &impl RowKernel<1>,
) -> Result<Tensor> {
    fn from<T: Element<Real = f32>>(
        op: &'static str,
        x: &Tensor,
        dtype: DType,
        kernel: &impl RowKernel<1>,
    ) -> Result<Tensor> {
        match dtype {
            DType::F32 => mapped::<T, f32, 1>([x], 1, kernel),
            DType::BF16 => mapped::<T, bf16, 1>([x], 1, kernel),
            DType::F16 => mapped::<T, f16, 1>([x], 1, kernel),
            got => Err(narrow_only(op, "the result", got)),
        }
    }
    check()?;
    match x.dtype() {
        DType::F32 => from::<f32>(op, x, dtype, kernel),
        DType::BF16 => from::<bf16>(op, x, dtype, kernel),
        DType::F16 => from::<f16>(op, x, dtype, kernel),
        got => Err(narrow_only(op, "x", got)),
    }
}

fn narrow_only(op: &'static str, what: &'static str, got: DType) -> crate::Error {
    crate::Error::DType {
        op,
        what,
        expected: "f32, bf16 or f16",
        got,
    }
}

fn mapped<T: Element, U: Element<Real = T::Real>, const N: usize>(
    inputs: [&Tensor; N],
    cols: usize,
    kernel: &impl RowKernel<N>,
) -> Result<Tensor> {
    let values = with_slices(inputs, |inputs: [&[T]; N]| {
        let (count, cols) = (inputs.first().map_or(0, |x| x.len()), cols.max(1));
        let len = block_rows(count / cols, cols) * cols;
        let (values, _) = filled(U::ZERO, count, len, |start, out: &mut [U]| {
            let mut buffers: [Vec<T::Real>; N] = std::array::from_fn(|_| Vec::new());
            let mut blocks: [&[T::Real]; N] = [&[]; N];
            for ((block, buffer), input) in blocks.iter_mut().zip(&mut buffers).zip(inputs) {
                *block = T::load(&input[start..start + out.len()], buffer);
            }
            U::store(out, |out| {
                simd(
                    #[inline(always)]
                    || kernel.rows(blocks, out),
                );
            });
        });
        values
    })?;
    match inputs.first() {
        Some(first) => tensor_of(storage::<U>(values), first.shape()),
        None => internal!("no tensors"),
    }
}

/// `kernel` of each block of the elements of a CPU tensor, in order. How long blocks are depends on the number of elements alone.
///
/// # Errors
/// As [`map_rows`].
pub fn reduce_blocks(op: &'static str, x: &Tensor, kernel: &impl BlockKernel) -> Result<Vec<f64>> {
    fn blocks<T: Element>(x: &[T], kernel: &impl BlockKernel) -> Vec<f64> {
        crate::base::parallel::map(x.chunks(block_rows(x.len(), 1)), |block| {
            let mut buffer = Vec::new();
            let elements = T::load(block, &mut buffer);
            let part = simd(
                #[inline(always)]
                || kernel.block(elements),
            );
            part.to_f64()
        })
    }
    check()?;
    for_dtype!(op, x.dtype(), T => with_slices([x], |[x]: [&[T]; 1]| blocks(x, kernel)))
}
