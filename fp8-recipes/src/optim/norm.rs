//! The Euclidean norm over all gradients, the same bits for every number of threads.

use candle_core::{CpuStorage, DType, Device, Result, Storage, Tensor, WithDType, bail};
use rayon::prelude::*;

/// Elements per partial sum. Fixed, so that the order of additions never depends on the number of
/// threads.
const BLOCK: usize = 1 << 14;
/// Independent running sums inside a block, so that the loop vectorizes.
const LANES: usize = 8;

/// sqrt(sum of squares) over all `grads`, summed in f64. Not finite exactly when some element is
/// not finite (f64 gradients whose squares overflow aside). `partials` is scratch that keeps its
/// memory between calls.
pub(super) fn global_norm<'a>(
    grads: impl Iterator<Item = &'a Tensor>,
    partials: &mut Vec<f64>,
) -> Result<f64> {
    let mut total = 0f64;
    let mut on_device = Vec::new();
    for grad in grads {
        match grad.device() {
            Device::Cpu => total += cpu_sum_of_squares(grad, partials)?,
            device => on_device.push(device_sum_of_squares(grad, device)?),
        }
    }
    // One copy to the host for all tensors of an accelerator.
    if let Some(first) = on_device.first() {
        let device = first.device().clone();
        let sums = on_device
            .iter()
            .map(|sum| sum.to_device(&device))
            .collect::<Result<Vec<_>>>()?;
        let sums = Tensor::stack(&sums, 0)?
            .to_device(&Device::Cpu)?
            .to_dtype(DType::F64)?
            .to_vec1::<f64>()?;
        total += sums.iter().sum::<f64>();
    }
    Ok(total.sqrt())
}

/// Sum of squares as a scalar tensor on the accelerator: in f64 where the device has it, else in
/// f32.
fn device_sum_of_squares(grad: &Tensor, device: &Device) -> Result<Tensor> {
    let dtype = if device.is_cuda() {
        DType::F64
    } else {
        DType::F32
    };
    grad.to_dtype(dtype)?.sqr()?.sum_all()
}

fn cpu_sum_of_squares(grad: &Tensor, partials: &mut Vec<f64>) -> Result<f64> {
    let grad = grad.contiguous()?;
    let (storage, layout) = grad.storage_and_layout();
    let (Storage::Cpu(cpu), Some(range)) = (&*storage, layout.contiguous_offsets()) else {
        bail!("gradient norm: expected a contiguous tensor on the CPU")
    };
    let (start, end) = range;
    match cpu {
        CpuStorage::F32(values) => Ok(blocks(&values[start..end], partials)),
        CpuStorage::F64(values) => Ok(blocks(&values[start..end], partials)),
        CpuStorage::BF16(values) => Ok(blocks(&values[start..end], partials)),
        CpuStorage::F16(values) => Ok(blocks(&values[start..end], partials)),
        _ => bail!(
            "gradient norm: {:?} is not a floating point dtype",
            grad.dtype()
        ),
    }
}

fn blocks<T: WithDType>(values: &[T], partials: &mut Vec<f64>) -> f64 {
    if values.len() <= BLOCK {
        return block(values);
    }
    partials.clear();
    partials.resize(values.len().div_ceil(BLOCK), 0.0);
    values
        .par_chunks(BLOCK)
        .zip(partials.par_iter_mut())
        .for_each(|(chunk, partial)| *partial = block(chunk));
    partials.iter().sum()
}

fn block<T: WithDType>(values: &[T]) -> f64 {
    let mut lanes = [0f64; LANES];
    let mut chunks = values.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            let value = value.to_f64();
            *lane += value * value;
        }
    }
    let tail: f64 = chunks
        .remainder()
        .iter()
        .map(|value| value.to_f64() * value.to_f64())
        .sum();
    lanes.iter().sum::<f64>() + tail
}
