//! Devices and threads on a GPU. A program of its own, since it opens devices as users do.

use candle_core::{Device, Tensor};
use fp8_candle::device::{open_cuda, open_cuda_untracked};
use fp8_candle::{Error, Quantizer, Result};
use fp8_core::Contraction::Cols;
use fp8_core::{Format, Granularity};
use fp8_test_support::skipped_on_cpu;
use std::thread;

fn cast(x: &Tensor) -> Result<Tensor> {
    let quantizer = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise);
    quantizer.quantize(x, Cols)?.tensor.dequantize(x.dtype())
}

/// Powers of two, which casts keep, so many that a copy takes its time.
fn values(device: &Device) -> Result<Tensor> {
    let values: Vec<f32> = (0..1 << 20).map(|i| [1f32, -2., 0.5, 4.][i % 4]).collect();
    Ok(Tensor::from_vec(values, (1024, 1024), device)?)
}

#[test]
fn one_thread_computes_and_another_reads() -> Result<()> {
    if skipped_on_cpu() {
        return Ok(());
    }
    // SAFETY: no tensor goes to another device, and nothing here uses the stream.
    for device in [open_cuda(0)?, unsafe { open_cuda_untracked(0)? }] {
        for _ in 0..20 {
            let x = values(&device)?;
            let y = cast(&x)?;
            // Work of this thread goes on while the other one reads.
            let z = y.clone();
            let there =
                thread::spawn(move || Ok::<_, Error>(cast(&z)?.flatten_all()?.to_vec1::<f32>()?));
            let here = cast(&y)?.flatten_all()?.to_vec1::<f32>()?;
            let there = there.join().unwrap()?;
            assert_eq!(here, x.flatten_all()?.to_vec1::<f32>()?);
            assert_eq!(here, there);
        }
    }
    Ok(())
}

#[test]
fn a_stream_of_the_calling_thread_is_refused_on_the_second() -> Result<()> {
    if skipped_on_cpu() {
        return Ok(());
    }
    let device = Device::new_cuda(0)?;
    let x = values(&device)?;
    let y = cast(&x)?;
    let error = thread::spawn(move || cast(&y).map(|_| ()).unwrap_err());
    let error = error.join().unwrap();
    assert!(
        matches!(error, Error::StreamOfAnotherThread(_)),
        "{error:?}"
    );
    for part in ["gpu_id: 0", "Device::new_cuda", "open_cuda"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    // The first thread goes on, and another device of the same GPU belongs to whoever uses it first.
    cast(&x)?;
    let other = Device::new_cuda(0)?;
    thread::spawn(move || cast(&values(&other)?).map(|_| ()))
        .join()
        .unwrap()
}

#[test]
fn kernels_of_one_device_serve_the_next() -> Result<()> {
    if skipped_on_cpu() {
        return Ok(());
    }
    for _ in 0..3 {
        let device = open_cuda(0)?;
        let x = values(&device)?;
        assert_eq!(cast(&x)?.to_vec2::<f32>()?, x.to_vec2::<f32>()?);
    }
    Ok(())
}
