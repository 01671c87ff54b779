//! Linear layers in high precision: each row of the result is what it is alone.

use super::dots::{self, Held, Rows, Sizes};
use super::elements::{Element, for_narrow, storage, with_slices};
use super::gemm::Epilogue;
use super::pages;
use crate::base::data::storage::tensor_of;
use crate::base::error::Result;
use crate::base::parallel::shared::Shared;
use candle_core::{DType, Storage, Tensor, WithDType};
use fp8_core::Isa;
use std::mem::MaybeUninit;
use std::ops::Range;

const OP: &str = "linear";

/// `x weight^T + bias` in the dtype of `x`: the sums in f32, or f64 if `x` is, rounded before the bias is added in that dtype.
///
/// `x`: `[m, k]`; `weight`: `[n, k]`, in its own dtype; `bias`: `[n]`; result `[m, n]`.
pub(crate) fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let ((m, k), n) = (x.dims2()?, weight.dim(0)?);
    let sizes = (m, n, k);
    // Rounded to the dtype of the result first.
    let bias = bias.map(|bias| bias.to_dtype(x.dtype())).transpose()?;
    if x.dtype() == DType::F64 {
        let weight = weight.to_dtype(DType::F64)?;
        return tensor_of(in_f64(x, &weight, bias.as_ref(), sizes)?, (m, n));
    }
    let bias = bias.map(|bias| bias.to_dtype(DType::F32)?.to_vec1::<f32>());
    let bias = bias.transpose()?;
    let weight = match weight.dtype() {
        DType::F64 => weight.to_dtype(DType::F32)?,
        _ => weight.clone(),
    };
    for_narrow!(OP, "x", x.dtype(), X => {
        for_narrow!(OP, "the weight", weight.dtype(), W => {
            tensor_of(in_f32::<X, W>(x, &weight, bias.as_deref(), sizes)?, (m, n))
        })
    })
}

fn in_f32<X: Element<Real = f32>, W: Element<Real = f32> + Held>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&[f32]>,
    (m, n, k): (usize, usize, usize),
) -> Result<Storage> {
    let epilogue = Epilogue::unscaled(bias);
    with_slices([x], |[x]: [&[X]; 1]| {
        with_slices([weight], |[weight]: [&[W]; 1]| {
            storage(filled(m * n, |out: Shared<'_, MaybeUninit<X>>| {
                let sizes = Sizes { m, n, k };
                dots::product(
                    Isa::best(),
                    sizes,
                    widened(x, k),
                    (widened(weight, k), Some(weight)),
                    |row, col, sums| {
                        let first = row * n + col;
                        // SAFETY: each element is finished once.
                        let out = unsafe { out.part(first..first + sums.len()) };
                        epilogue.finish_row(row, col, sums, out);
                    },
                );
            }))
        })
    })?
}

fn in_f64(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    (m, n, k): (usize, usize, usize),
) -> Result<Storage> {
    let bias = bias.map(Tensor::to_vec1::<f64>).transpose()?;
    with_slices([x, weight], |[x, weight]: [&[f64]; 2]| {
        storage(filled(m * n, |out| {
            let sizes = Sizes { m, n, k };
            dots::product_f64(sizes, copied(x, k), copied(weight, k), |row, col, sums| {
                let first = row * n + col;
                // SAFETY: each element is finished once.
                let out = unsafe { out.part(first..first + sums.len()) };
                for (i, (out, &sum)) in out.iter_mut().zip(sums).enumerate() {
                    out.write(bias.as_ref().map_or(sum, |bias| sum + bias[col + i]));
                }
            });
        }))
    })
}

/// `len` values, every one of which `fill` writes, or panics.
fn filled<T: WithDType>(len: usize, fill: impl FnOnce(Shared<'_, MaybeUninit<T>>)) -> Vec<T> {
    let mut values = pages::vec_for::<T>(len);
    fill(Shared::new(&mut values.spare_capacity_mut()[..len]));
    // SAFETY: products finish every element.
    unsafe { values.set_len(len) };
    values
}

/// Rows of `k` values, widened.
fn widened<T: Element<Real = f32>>(values: &[T], k: usize) -> impl Rows<f32> {
    move |rows: Range<usize>, stride: usize, dst: &mut [f32]| {
        let values = values[rows.start * k..rows.end * k].chunks_exact(k);
        for (values, dst) in values.zip(dst.chunks_mut(stride)) {
            fp8_core::widen(values, &mut dst[..k]);
        }
    }
}

/// Rows of `k` values.
fn copied(values: &[f64], k: usize) -> impl Rows<f64> {
    move |rows: Range<usize>, stride: usize, dst: &mut [f64]| {
        let values = values[rows.start * k..rows.end * k].chunks_exact(k);
        for (values, dst) in values.zip(dst.chunks_mut(stride)) {
            dst[..k].copy_from_slice(values);
        }
    }
}
