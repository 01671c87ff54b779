//! Products of few rows with a matrix that is read once, in its own dtype.

use crate::base::check::{check_device, check_float, last_dim};
use crate::base::data::matrix_dims;
use crate::base::data::storage::tensor_of;
use crate::base::error::{Error, Result, shape_error};
use crate::base::simd::simd;
use crate::device::cpu::elements::{Element, storage, with_slices};
use candle_core::{DType, Tensor};
use half::{bf16, f16};

const OP: &str = "few_rows_linear";

/// `x weight^T` for few rows of `x`, for inference: the weight is read once and widened on the way, so a head of 16-bit
/// numbers costs what its bytes cost. Sums are in f32.
///
/// candle widens a whole 16-bit matrix in memory for every product with f32. For many rows, or where a gradient is wanted,
/// that is the better way: `x.matmul(&weight.to_dtype(x.dtype())?.t()?)`.
///
/// # Shapes
/// `x` `[.., in]` in f32, bf16 or f16, `weight` `[out, in]` in f32, bf16 or f16; result `[.., out]` in x's dtype.
///
/// # Errors
/// If shapes, dtypes or devices do not fit, or a gradient is tracked, which would be lost.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device, Tensor};
///
/// let x = Tensor::new(&[[1f32, 2.0]], &Device::Cpu)?;
/// let head = Tensor::new(&[[1f32, 0.5], [0.0, 4.0]], &Device::Cpu)?.to_dtype(DType::BF16)?;
/// let y = fp8_candle::ops::few_rows_linear(&x, &head)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[2.0, 8.0]]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn few_rows_linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    check_float(OP, "x", x)?;
    check_float(OP, "weight", weight)?;
    check_device(OP, "weight", weight, x.device())?;
    if x.track_op() || weight.track_op() {
        return Err(Error::Candle(candle_core::Error::msg(
            "few_rows_linear has no backward pass, and a gradient is tracked: use matmul",
        )));
    }
    let inputs = last_dim(OP, "x", x)?;
    let &[outputs, width] = weight.dims() else {
        return Err(shape_error(OP, "weight", "[out, in]", weight.dims()));
    };
    if width != inputs {
        return Err(shape_error(
            OP,
            "weight",
            format!("[out, {inputs}], as x"),
            weight.dims(),
        ));
    }
    let shape = [&x.dims()[..x.rank() - 1], &[outputs]].concat();
    if !x.device().is_cpu() {
        let (rows, _) = matrix_dims(x.dims());
        let y = x
            .reshape((rows, inputs))?
            .matmul(&weight.to_dtype(x.dtype())?.t()?)?;
        return Ok(y.reshape(shape)?);
    }
    crate::base::simd::check()?;
    let (rows, _) = matrix_dims(x.dims());
    let wide = x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    let y = match weight.dtype() {
        DType::BF16 => product::<bf16>(&wide, weight, rows, inputs)?,
        DType::F16 => product::<f16>(&wide, weight, rows, inputs)?,
        // Sums are in f32 all the same.
        _ => product::<f32>(&wide, &weight.to_dtype(DType::F32)?, rows, inputs)?,
    };
    Ok(tensor_of(storage(y), shape)?.to_dtype(x.dtype())?)
}

/// Rows of the weight in a task.
const TASK: usize = 256;

fn product<T: Element<Real = f32>>(
    x: &[f32],
    weight: &Tensor,
    rows: usize,
    inputs: usize,
) -> Result<Vec<f32>> {
    with_slices([weight], |[weight]: [&[T]; 1]| {
        let outputs = weight.len().checked_div(inputs).unwrap_or(0);
        // Outputs first, so that a task writes one contiguous part; transposed at the end, which one row does not need.
        let mut transposed = vec![0f32; outputs * rows];
        if transposed.is_empty() {
            return transposed;
        }
        let parts = transposed.chunks_mut(TASK * rows).enumerate();
        crate::base::parallel::for_each(parts, |(task, y)| {
            let mut buffer = Vec::new();
            let first = task * TASK;
            for (i, y) in y.chunks_mut(rows).enumerate() {
                let row = &weight[(first + i) * inputs..(first + i + 1) * inputs];
                let row = T::load(row, &mut buffer);
                simd(
                    #[inline(always)]
                    || {
                        let mut x = x;
                        let mut y = &mut *y;
                        // Rows of x together read a row of the weight once from the first-level cache.
                        while let [_, more @ ..] = &*y {
                            let count = match more.len() {
                                3.. => 4,
                                1.. => 2,
                                0 => 1,
                            };
                            let (results, rest) = y.split_at_mut(count);
                            let (rows, others) = x.split_at(count * inputs);
                            match count {
                                4 => dots::<4>(rows, row, results),
                                2 => dots::<2>(rows, row, results),
                                _ => dots::<1>(rows, row, results),
                            }
                            (x, y) = (others, rest);
                        }
                    },
                );
            }
        });
        if rows == 1 {
            return transposed;
        }
        let mut y = vec![0f32; transposed.len()];
        for (i, values) in transposed.chunks(rows).enumerate() {
            for (row, value) in values.iter().enumerate() {
                y[row * outputs + i] = *value;
            }
        }
        y
    })
}

/// Partial sums of a product: few enough for those of four rows to stay in the registers of AVX2.
const LANES: usize = 16;

/// The products of `R` rows of `x` with `row`, each summed in the same order for every `R`.
#[inline(always)]
fn dots<const R: usize>(x: &[f32], row: &[f32], y: &mut [f32]) {
    let inputs = row.len();
    let (chunks, tail) = row.as_chunks::<LANES>();
    let x: [_; R] = std::array::from_fn(|i| x[i * inputs..(i + 1) * inputs].as_chunks::<LANES>());
    let mut sums = [[0f32; LANES]; R];
    for (at, row) in chunks.iter().enumerate() {
        for (sums, (x, _)) in sums.iter_mut().zip(&x) {
            let x = &x[at];
            for lane in 0..LANES {
                sums[lane] += x[lane] * row[lane];
            }
        }
    }
    for ((y, mut sums), (_, x)) in y.iter_mut().zip(sums).zip(x) {
        for ((sum, x), weight) in sums.iter_mut().zip(x).zip(tail) {
            *sum += x * weight;
        }
        *y = total(sums);
    }
}

// Not inlined, or LLVM would arrange the sums above for the shuffles of this tree.
#[inline(never)]
fn total(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}
