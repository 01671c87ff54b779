//! Between tensors and kernels: dtypes, slices, and the division of rows among threads.

use super::scratch::{Plain, Scratch};
use crate::base::check::check_dtype;
use crate::base::data::storage::tensor_of;
use crate::base::error::{Result, internal};
use crate::base::math::Real;
use crate::device::{filled, filled_in_pieces};
use bytemuck::NoUninit;
use candle_core::{DType, Layout, Shape, Storage, Tensor, WithDType};
use fp8_core::HighPrecision;
use half::{bf16, f16};
use std::ops::Deref;

/// The type of a tensor's elements, and the type in which its kernels compute.
pub(crate) trait Element: WithDType + HighPrecision + NoUninit + Plain {
    type Real: Real + WithDType;

    /// The values of `src`, in `buffer` if they have to be widened.
    fn load<'a>(src: &'a [Self], buffer: &'a mut Buffer) -> &'a [Self::Real];

    /// Writes what `fill` computes, rounded once; `fill` writes all of the slice that it gets, which has any values.
    fn store(dst: &mut [Self], fill: impl FnOnce(&mut [Self::Real]));

    /// Changes values in place, rounded once.
    fn update(values: &mut [Self], change: impl FnOnce(&mut [Self::Real]));
}

/// Room for widened values, reused by the thread.
#[derive(Default)]
pub(crate) struct Buffer(Option<Scratch<f32>>);

macro_rules! wide {
    ($float:ty) => {
        impl Element for $float {
            type Real = $float;

            fn load<'a>(src: &'a [Self], _: &'a mut Buffer) -> &'a [Self] {
                src
            }

            fn store(dst: &mut [Self], fill: impl FnOnce(&mut [Self])) {
                fill(dst);
            }

            fn update(values: &mut [Self], change: impl FnOnce(&mut [Self])) {
                change(values);
            }
        }
    };
}
wide!(f32);
wide!(f64);

macro_rules! narrow {
    ($half:ty) => {
        impl Element for $half {
            type Real = f32;

            fn load<'a>(src: &'a [Self], buffer: &'a mut Buffer) -> &'a [f32] {
                let values = buffer.0.insert(Scratch::new(src.len()));
                fp8_core::widen(src, values);
                values
            }

            fn store(dst: &mut [Self], fill: impl FnOnce(&mut [f32])) {
                let mut buffer = Scratch::new(dst.len());
                fill(&mut buffer);
                fp8_core::narrow(&buffer, dst);
            }

            fn update(values: &mut [Self], change: impl FnOnce(&mut [f32])) {
                let mut buffer = Scratch::new(values.len());
                fp8_core::widen(values, &mut buffer);
                change(&mut buffer);
                fp8_core::narrow(&buffer, values);
            }
        }
    };
}
narrow!(bf16);
narrow!(f16);

/// Runs `$body` with the type `$T` of `$dtype`: f32, bf16 or f16, else an error about `$what` of `$op`.
macro_rules! for_narrow {
    ($op:expr, $what:expr, $dtype:expr, $T:ident => $body:expr) => {
        $crate::device::cpu::elements::for_narrow!(@narrow_error, $op, $what, $dtype, $T => $body)
    };
    (@$error:ident, $op:expr, $what:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            ::candle_core::DType::F32 => {
                type $T = f32;
                $body
            }
            ::candle_core::DType::BF16 => {
                type $T = ::half::bf16;
                $body
            }
            ::candle_core::DType::F16 => {
                type $T = ::half::f16;
                $body
            }
            got => Err($crate::base::check::$error($op, $what, got)),
        }
    };
}
pub(crate) use for_narrow;

/// [`for_narrow`], and f64. `$what` is `x` by default.
macro_rules! for_dtype {
    ($op:expr, $dtype:expr, $T:ident => $body:expr) => {
        $crate::device::cpu::elements::for_dtype!($op, "x", $dtype, $T => $body)
    };
    ($op:expr, $what:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            ::candle_core::DType::F64 => {
                type $T = f64;
                $body
            }
            dtype => $crate::device::cpu::elements::for_narrow!(
                @float_error, $op, $what, dtype, $T => $body
            ),
        }
    };
}
pub(crate) use for_dtype;

/// A CPU tensor in another dtype, contiguous, outside any graph. candle converts between f32 and 16 bits one value after the other, on one
/// thread.
pub(crate) fn converted(x: &Tensor, dtype: DType) -> Result<Tensor> {
    const TASK: usize = 1 << 14;
    let x = x.detach();
    match (x.dtype(), dtype) {
        (DType::F32, DType::BF16 | DType::F16) => for_narrow!("to_dtype", "x", dtype, T => {
            with_slices([&x], |[values]: [&[f32]; 1]| {
                let (narrow, _) = filled(T::default(), values.len(), TASK, |start, narrow| {
                    fp8_core::narrow(&values[start..start + narrow.len()], narrow);
                });
                tensor(narrow, x.shape())
            })?
        }),
        (DType::BF16 | DType::F16, DType::F32) => for_narrow!("to_dtype", "x", x.dtype(), T => {
            with_slices([&x], |[values]: [&[T]; 1]| {
                let (wide, _) = filled(0f32, values.len(), TASK, |start, wide| {
                    fp8_core::widen(&values[start..start + wide.len()], wide);
                });
                tensor(wide, x.shape())
            })?
        }),
        _ => Ok(x.to_dtype(dtype)?.contiguous()?),
    }
}

/// A CPU tensor rounded to bf16, contiguous.
pub(crate) fn to_bf16(x: &Tensor) -> Result<Tensor> {
    converted(x, DType::BF16)
}

/// The dtype in which kernels for `dtype` compute.
pub(crate) fn compute_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 {
        DType::F64
    } else {
        DType::F32
    }
}

/// The values of a contiguous tensor.
fn slice<'a, T: WithDType>(storage: &'a Storage, layout: &Layout) -> Result<&'a [T]> {
    let Storage::Cpu(storage) = storage else {
        internal!("a fused op takes CPU tensors");
    };
    match layout.contiguous_offsets() {
        // A part of an empty tensor may start behind its end.
        Some((start, end)) if start == end => Ok(&[]),
        Some((start, end)) => Ok(&storage.as_slice::<T>()?[start..end]),
        None => internal!(
            "a fused op takes contiguous tensors, got strides {:?}",
            layout.stride()
        ),
    }
}

/// Tensors of any layout, made contiguous. A function of its own, as [`with_slices`] is compiled for each closure that it gets.
fn contiguous(tensors: &[&Tensor]) -> candle_core::Result<Vec<Tensor>> {
    tensors.iter().map(|tensor| tensor.contiguous()).collect()
}

/// Calls `f` with the values of CPU tensors of one dtype, made contiguous first.
pub(crate) fn with_slices<T: WithDType, const N: usize, Out>(
    tensors: [&Tensor; N],
    f: impl FnOnce([&[T]; N]) -> Out,
) -> Result<Out> {
    let tensors = contiguous(&tensors)?;
    let storages = storages(&tensors);
    let mut slices: [&[T]; N] = [&[]; N];
    for (out, (storage, layout)) in slices.iter_mut().zip(&storages) {
        *out = slice(storage, layout)?;
    }
    Ok(f(slices))
}

fn storages(tensors: &[Tensor]) -> Vec<(impl Deref<Target = Storage>, &Layout)> {
    tensors.iter().map(Tensor::storage_and_layout).collect()
}

/// Calls `f` with the values of a CPU tensor, which is `what` of `op`, made contiguous first.
pub(super) fn with_slice<T: WithDType, Out>(
    op: &'static str,
    what: &'static str,
    x: &Tensor,
    f: impl FnOnce(&[T]) -> Result<Out>,
) -> Result<Out> {
    check_dtype(op, what, x, T::DTYPE)?;
    with_slices([x], |[values]: [&[T]; 1]| f(values))?
}

/// [`with_slice`] of f32 scales.
pub(crate) fn with_scales<Out>(
    op: &'static str,
    scales: &Tensor,
    f: impl FnOnce(&[f32]) -> Result<Out>,
) -> Result<Out> {
    with_slice(op, "a scale", scales, f)
}

/// [`with_slice`] of U8 codes.
pub(crate) fn with_codes<Out>(
    op: &'static str,
    codes: &Tensor,
    f: impl FnOnce(&[u8]) -> Result<Out>,
) -> Result<Out> {
    with_slice(op, "codes", codes, f)
}

/// A CPU storage that owns `values`.
pub(crate) fn storage<T: WithDType>(values: Vec<T>) -> Storage {
    Storage::Cpu(T::to_cpu_storage_owned(values))
}

/// A detached CPU tensor that owns `values`, as many as `shape` needs.
pub(crate) fn tensor<T: WithDType>(values: Vec<T>, shape: impl Into<Shape>) -> Result<Tensor> {
    tensor_of(storage(values), shape)
}

/// Rows per block of a `[rows, cols]` matrix: at most 64 blocks, of 8192 elements or more. It depends only on the shape, so
/// that partial sums per block are the same on any number of threads.
pub(crate) fn block_rows(rows: usize, cols: usize) -> usize {
    const MAX_BLOCKS: usize = 64;
    const MIN_BLOCK: usize = 8192;
    rows.div_ceil(MAX_BLOCKS)
        .max(MIN_BLOCK.div_ceil(cols.max(1)))
}

/// Elements of whole rows that are computed at a time: with their inputs they stay in the core's own cache.
pub(crate) fn piece_len(cols: usize) -> usize {
    const PIECE: usize = 1 << 11;
    cols.max(1) * (PIECE / cols.max(1)).max(1)
}

/// Calls `f(start, block)` for each block of `len` elements of `dst`, in parallel; the results are in order.
pub(crate) fn par_blocks<T: Send, Out: Send>(
    dst: &mut [T],
    len: usize,
    f: impl Fn(usize, &mut [T]) -> Out + Sync,
) -> Vec<Out> {
    if dst.is_empty() {
        Vec::new()
    } else if dst.len() <= len {
        vec![f(0, dst)]
    } else {
        let blocks = dst.chunks_mut(len).enumerate();
        crate::base::parallel::map(blocks, |(i, block)| f(i * len, block))
    }
}

/// `out[i] = f(inputs[..][i])` for whole rows of `cols` elements: allocates the result, widens the inputs a few rows at
/// a time and passes them to `f(first_row, rows, out_rows)`.
pub(crate) fn map_rows<T: Element, const N: usize>(
    inputs: [&[T]; N],
    cols: usize,
    f: impl Fn(usize, [&[T::Real]; N], &mut [T::Real]) + Sync,
) -> Vec<T> {
    map_rows_to(inputs, cols, f)
}

/// [`map_rows`] to elements of another type.
pub(crate) fn map_rows_to<T: Element, U: Element<Real = T::Real>, const N: usize>(
    inputs: [&[T]; N],
    cols: usize,
    f: impl Fn(usize, [&[T::Real]; N], &mut [T::Real]) + Sync,
) -> Vec<U> {
    rows_to(inputs, cols, &f)
}

/// What [`map_rows_to`] calls with the number of the first row.
type OfRows<'a, R, const N: usize> = &'a (dyn Fn(usize, [&[R]; N], &mut [R]) + Sync);

/// [`map_rows_to`], compiled once for all functions.
fn rows_to<T: Element, U: Element<Real = T::Real>, const N: usize>(
    inputs: [&[T]; N],
    cols: usize,
    f: OfRows<'_, T::Real, N>,
) -> Vec<U> {
    let (count, cols) = (inputs.first().map_or(0, |x| x.len()), cols.max(1));
    let lens = [block_rows(count / cols, cols) * cols, piece_len(cols)];
    let (dst, _) = filled_in_pieces(U::default(), count, lens, |pieces| {
        let mut buffers: [Buffer; N] = std::array::from_fn(|_| Buffer::default());
        for (start, dst) in pieces {
            let mut blocks: [&[T::Real]; N] = [&[]; N];
            for ((block, buffer), input) in blocks.iter_mut().zip(&mut buffers).zip(inputs) {
                *block = T::load(&input[start..start + dst.len()], buffer);
            }
            U::store(dst, |dst| f(start / cols, blocks, dst));
        }
    });
    dst
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounding_is_that_of_half() {
        // Every upper half, with the lower halves around which rounding changes.
        let lower = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF];
        for upper in 0..=u16::MAX {
            let src =
                lower.map(|lower: u16| f32::from_bits((u32::from(upper) << 16) | u32::from(lower)));
            let mut dst = [bf16::ZERO; 6];
            fp8_core::narrow(&src, &mut dst);
            for (src, dst) in src.iter().zip(dst) {
                assert_eq!(
                    dst.to_bits(),
                    bf16::from_f32(*src).to_bits(),
                    "{src} = {:08x}",
                    src.to_bits()
                );
            }
        }
        let all: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        let mut wide = vec![0.0; all.len()];
        fp8_core::widen(&all, &mut wide);
        assert!(
            all.iter()
                .zip(&wide)
                .all(|(h, w)| h.to_f32().to_bits() == w.to_bits() || h.is_nan() && w.is_nan())
        );
    }
}
