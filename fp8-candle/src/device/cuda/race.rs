//! Which of several ways to compute a product is the fastest, tried once for each shape.
//!
//! The first proposal of cuBLASLt's heuristic is often not the fastest. Its proposals may also add up in different orders, and then a
//! result would depend on which of them was faster when a program began: a resumed run would not repeat its losses, and ranks
//! would not agree. So only those compete that give the bits of the first on operands made for this ([`Trial`](super::trial::Trial)).

use super::gpu::Gpu;
use super::trial::differ;
use crate::base::error::Result;
use candle_core::DType;
use candle_core::cuda_backend::cudarc::driver::sys::{CUevent_flags, CUstreamCaptureStatus};

/// Rounds, in which all take turns, and runs of each in a round. The best round counts.
const ROUNDS: usize = 2;
const RUNS: usize = 3;

/// How much less time than the first, which the library expects to be best, another must take to be preferred.
const GAIN: f32 = 0.98;

/// Whether a CUDA graph is being recorded on the stream of `gpu`: then nothing can be timed.
pub(super) fn is_recording(gpu: &Gpu) -> Result<bool> {
    let status = gpu
        .stream()
        .capture_status()
        .map_err(candle_core::Error::wrap)?;
    Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// Whether results of `len` values show the order of adding. Two orders of f32 sums change at least a few in a million bf16
/// results, and nearly all f32 ones. Where fewer are computed, time goes mostly into the launch.
pub(super) fn shows_order(dtype: DType, len: usize) -> bool {
    match dtype {
        DType::F32 => len >= 1 << 10,
        _ => len >= 1 << 20,
    }
}

/// The index of the fastest of `count` ways. `run` computes the whole result, of `len` bytes at `out`; what is there afterwards
/// is undefined. Ways that fail are left out; only a failure of the first is an error.
///
/// # Safety
/// `out` must be the address of `len` bytes of `gpu`'s memory, aligned to 4, that nothing else uses meanwhile.
pub(super) unsafe fn race(
    gpu: &Gpu,
    count: usize,
    (out, len): (u64, usize),
    run: impl Fn(usize) -> Result<()>,
) -> Result<usize> {
    let wrap = candle_core::Error::wrap;
    let stream = gpu.stream();
    let Ok(expected) = gpu.alloc(DType::U8, len) else {
        // Without memory to compare in, the first.
        return Ok(0);
    };
    run(0)?;
    // SAFETY: the caller's result, and a buffer as long.
    unsafe { gpu.copy(out, expected.ptr(), len)? };
    let mut times = vec![None; count];
    times[0] = Some(f32::INFINITY);
    for (index, time) in times.iter_mut().enumerate().skip(1) {
        // Elements that this way does not write must not keep the last way's result.
        // SAFETY: as above.
        unsafe { gpu.fill(out, len)? };
        // SAFETY: as above.
        let same = run(index).is_ok() && unsafe { !differ(gpu, out, expected.ptr(), len)? };
        *time = same.then_some(f32::INFINITY);
    }
    let timing = Some(CUevent_flags::CU_EVENT_DEFAULT);
    for _ in 0..ROUNDS {
        for (index, best) in times.iter_mut().enumerate() {
            let Some(best) = best else { continue };
            let begin = stream.record_event(timing).map_err(wrap)?;
            for _ in 0..RUNS {
                run(index)?;
            }
            let end = stream.record_event(timing).map_err(wrap)?;
            *best = best.min(begin.elapsed_ms(&end).map_err(wrap)?);
        }
    }
    Ok(fastest(&times))
}

/// The index of the least time, the first unless another is clearly faster.
fn fastest(times: &[Option<f32>]) -> usize {
    let mut fastest = 0;
    let mut least = times.first().copied().flatten().unwrap_or(f32::INFINITY) * GAIN;
    for (index, time) in times.iter().enumerate().skip(1) {
        if let Some(time) = *time
            && time < least
        {
            (fastest, least) = (index, time);
        }
    }
    fastest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::error::internal;
    use crate::device::cuda::gpu::with_pointers;
    use candle_core::Tensor;

    #[test]
    fn the_first_stays_unless_another_is_clearly_faster() {
        assert_eq!(fastest(&[Some(1.)]), 0);
        assert_eq!(fastest(&[Some(1.), Some(0.99), None]), 0);
        assert_eq!(fastest(&[Some(1.), Some(0.9), Some(0.8), Some(0.85)]), 2);
        assert_eq!(fastest(&[Some(0.), Some(0.)]), 0);
        assert_eq!(fastest(&[]), 0);
    }

    /// Ways that fail, leave something out, or give other bits do not win; what they did to the result is not taken for it.
    #[test]
    fn only_ways_with_the_bits_of_the_first_take_part() -> Result<()> {
        let device = fp8_test_support::device();
        if !device.is_cuda() {
            println!("skipped: no CUDA device");
            return Ok(());
        }
        let gpu = Gpu::new(&device)?;
        for len in [4usize, 40, 4096 + 12] {
            let value = |x: f32| Tensor::full(x, len / 4, &device);
            let (right, wrong) = (value(1.5)?, value(1.75)?);
            let out = gpu.alloc(DType::U8, len)?;
            let runs = std::cell::RefCell::new([0; 4]);
            let run = |index: usize| -> Result<()> {
                runs.borrow_mut()[index] += 1;
                let (from, len) = match index {
                    0 => (&right, len),
                    1 => (&wrong, len),
                    2 => (&right, len - 4),
                    _ => internal!("this way fails"),
                };
                with_pointers(&gpu, [from], |[from]| {
                    // SAFETY: both have at least `len` bytes.
                    unsafe { gpu.copy(from, out.ptr(), len) }
                })
            };
            // SAFETY: `out` has `len` bytes and is used by nothing else.
            let winner = unsafe { race(&gpu, 4, (out.ptr(), len), run)? };
            assert_eq!(winner, 0, "{len}");
            assert_eq!(*runs.borrow(), [1 + ROUNDS * RUNS, 1, 1, 1], "{len}");
        }
        Ok(())
    }
}
