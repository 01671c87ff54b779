//! Loops over the elements of tensors, for crates that add operations: the loops of this crate's own kernels.
//!
//! Tensors are on the CPU. They are cut by their shapes alone into parts that run in parallel, 16-bit elements are widened to f32 and
//! rounded once at the end, and kernels are compiled for every instruction set. So no bit depends on the number of threads or the
//! processor.

pub use crate::base::data::matrix_dims;
pub use crate::base::math::{Real, max, sum};

use crate::base::error::{Result, internal};
use crate::base::simd::{check, simd};
use crate::device::cpu::elements::{
    Buffer, Element, block_rows, compute_dtype, for_dtype, for_narrow, map_rows_to, tensor,
    with_slices,
};
use candle_core::{DType, Tensor};

/// A function from the rows of `N` tensors to rows of the result.
pub trait RowKernel<const N: usize>: Sync {
    /// Writes `out`, a number of whole rows, from the same rows of the inputs.
    ///
    /// It must be `#[inline(always)]` and call only functions that are: code that is not inlined is compiled without vectors.
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
        for_narrow!(op, "the result", dtype, U => mapped::<T, U, 1>([x], 1, kernel))
    }
    check()?;
    for_narrow!(op, "x", x.dtype(), T => from::<T>(op, x, dtype, kernel))
}

fn mapped<T: Element, U: Element<Real = T::Real>, const N: usize>(
    inputs: [&Tensor; N],
    cols: usize,
    kernel: &impl RowKernel<N>,
) -> Result<Tensor> {
    let values: Vec<U> = with_slices(inputs, |inputs: [&[T]; N]| {
        map_rows_to(inputs, cols, |_, blocks, out| {
            simd(
                #[inline(always)]
                || kernel.rows(blocks, out),
            );
        })
    })?;
    match inputs.first() {
        Some(first) => tensor(values, first.shape()),
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
            let mut buffer = Buffer::default();
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
