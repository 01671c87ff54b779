//! The Euclidean norm over all gradients, with the same bits for every number of threads and on CUDA devices
//! (`fp8-candle/kernels/adamw.cu` adds in the same order).

use candle_core::{DType, Device, Result, Tensor};
use fp8_candle::parallel::vectorized;

use super::host::Slice;

/// Added to the norm before dividing by it, as `torch.nn.utils.clip_grad_norm_` does.
const CLIP_EPS: f64 = 1e-6;

/// What gradients of this norm are multiplied by.
pub(super) fn clip_coefficient(max_grad_norm: Option<f64>, norm: f64) -> f64 {
    match max_grad_norm {
        Some(limit) => (limit / (norm + CLIP_EPS)).min(1.0),
        None => 1.0,
    }
}

/// Elements per partial sum. Fixed, so that the order of additions does not depend on the number of threads; the ranges of sharded
/// parameters end at its multiples.
pub(super) const BLOCK: usize = fp8_ranks::BLOCK;
/// Independent running sums inside a block: element i belongs to lane i % LANES.
const LANES: usize = 1024;

/// The sum of squares over gradients, in f64. Not finite exactly when some element is not finite
/// (f64 gradients whose squares overflow aside).
///
/// On the CPU each block of each gradient gives a partial sum, 0 for blocks of a variable without
/// gradient, and the partial sums are added as the elements of a block are.
#[derive(Default)]
pub(super) struct SumOfSquares {
    /// Keeps its memory between steps.
    partials: Vec<f64>,
    on_device: Vec<Tensor>,
}

impl SumOfSquares {
    /// Starts the sum of a new step.
    pub(super) fn clear(&mut self) {
        self.partials.clear();
        self.on_device.clear();
    }

    /// Adds the gradient of a variable of `len` elements.
    pub(super) fn add(&mut self, len: usize, grad: Option<&Tensor>) -> Result<()> {
        match grad {
            Some(grad) if !grad.device().is_cpu() => {
                self.on_device.push(device_sum_of_squares(grad)?);
            }
            _ => {
                let start = self.partials.len();
                self.partials.resize(start + len.div_ceil(BLOCK), 0.0);
                if let Some(grad) = grad {
                    cpu_sums_of_squares(grad, &mut self.partials[start..])?;
                }
            }
        }
        Ok(())
    }

    /// Adds marks, each 0, or NaN if a cast has seen Inf or NaN.
    pub(super) fn add_marks(&mut self, marks: Vec<Tensor>) -> Result<()> {
        for mark in marks {
            match mark.device().is_cpu() {
                true => self.partials.push(mark.to_scalar()?),
                false => self.on_device.push(mark),
            }
        }
        Ok(())
    }

    /// Adds a sum that a device has computed, a tensor of one element.
    #[cfg(feature = "cuda")]
    pub(super) fn add_device_sum(&mut self, sum: Tensor) -> Result<()> {
        self.on_device.push(sum.reshape(())?);
        Ok(())
    }

    /// The partial sums on the CPU.
    pub(super) fn partials(&self) -> &[f64] {
        &self.partials
    }

    /// The sum of all; one copy to the host for all tensors of accelerators.
    pub(super) fn total(&self) -> Result<f64> {
        let mut total = sum_of_partials(&self.partials);
        if let Some(first) = self.on_device.first() {
            let sums = self.on_device.iter();
            let sums = sums.map(|sum| sum.to_device(first.device()));
            let sums = Tensor::stack(&sums.collect::<Result<Vec<_>>>()?, 0)?;
            let sums = sums.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
            total += sums.to_vec1::<f64>()?.iter().sum::<f64>();
        }
        Ok(total)
    }
}

/// The sum of partial sums that are in the order of variables and blocks.
pub(super) fn sum_of_partials(partials: &[f64]) -> f64 {
    lanes(partials, |partial| partial)
}

/// Sum of squares as a scalar tensor on the accelerator: in f64 where the device has it, else in f32.
fn device_sum_of_squares(grad: &Tensor) -> Result<Tensor> {
    let dtype = match grad.device().is_cuda() {
        true => DType::F64,
        false => DType::F32,
    };
    grad.to_dtype(dtype)?.sqr()?.sum_all()
}

fn cpu_sums_of_squares(grad: &Tensor, partials: &mut [f64]) -> Result<()> {
    Slice::with(grad, None, |grad| match grad {
        Slice::F32(values) => squares(values, partials, f64::from),
        Slice::F64(values) => squares(values, partials, |x| x),
        Slice::BF16(values) => squares(values, partials, |x| x.to_f32().into()),
        Slice::F16(values) => squares(values, partials, |x| x.to_f32().into()),
        // Gradients of variables are floats.
        Slice::Codes(..) => {}
    })
}

fn squares<T: Copy + Sync>(
    values: &[T],
    partials: &mut [f64],
    widen: impl Fn(T) -> f64 + Copy + Sync,
) {
    let chunks = values.chunks(BLOCK).zip(partials);
    fp8_candle::parallel::for_each(chunks, |(chunk, partial)| {
        *partial = vectorized(
            #[inline(always)]
            || {
                lanes(
                    chunk,
                    #[inline(always)]
                    |x| {
                        let x = widen(x);
                        x * x
                    },
                )
            },
        );
    });
}

/// The sum of `term` over `values`: in lanes, which are then added by halves, lane i taking lane
/// i + 512, then i + 256, down to i + 1.
#[inline(always)]
fn lanes<T: Copy>(values: &[T], term: impl Fn(T) -> f64) -> f64 {
    let mut lanes = [0f64; LANES];
    for row in values.chunks(LANES) {
        for (lane, value) in lanes.iter_mut().zip(row) {
            *lane += term(*value);
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        let (low, high) = lanes.split_at_mut(half);
        for (low, high) in low.iter_mut().zip(high) {
            *low += *high;
        }
        half /= 2;
    }
    lanes[0]
}
