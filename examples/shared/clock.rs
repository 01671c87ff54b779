//! Points in time on a device: events on candle's stream on CUDA, where the host runs ahead; elsewhere the wall clock.

#[cfg(feature = "cuda")]
use anyhow::Context;
use anyhow::Result;
use candle_core::Device;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::{
    CudaEvent, CudaStream, sys::CUevent_flags::CU_EVENT_DEFAULT,
};
#[cfg(feature = "cuda")]
use std::sync::Arc;
use std::time::Instant;

/// The clock of a device.
pub struct Clock {
    #[cfg(feature = "cuda")]
    stream: Option<Arc<CudaStream>>,
}

/// A point in the work of a device.
pub enum Mark {
    Host(Instant),
    #[cfg(feature = "cuda")]
    Cuda(CudaEvent),
}

impl Clock {
    pub fn new(device: &Device) -> Self {
        #[cfg(not(feature = "cuda"))]
        let _ = device;
        Self {
            #[cfg(feature = "cuda")]
            stream: device.as_cuda_device().ok().map(|cuda| cuda.cuda_stream()),
        }
    }

    /// Marks the end of all work so far, without waiting for it.
    pub fn mark(&self) -> Result<Mark> {
        #[cfg(feature = "cuda")]
        if let Some(stream) = &self.stream {
            let event = stream
                .record_event(Some(CU_EVENT_DEFAULT))
                .context("recording a CUDA event")?;
            return Ok(Mark::Cuda(event));
        }
        Ok(Mark::Host(Instant::now()))
    }
}

impl Mark {
    /// Milliseconds from this mark to `end`; waits until the device has reached `end`.
    pub fn ms_until(&self, end: &Self) -> Result<f64> {
        match (self, end) {
            (Self::Host(begin), Self::Host(end)) => Ok((*end - *begin).as_secs_f64() * 1e3),
            #[cfg(feature = "cuda")]
            (Self::Cuda(begin), Self::Cuda(end)) => {
                let ms = begin.elapsed_ms(end).context("reading CUDA events")?;
                Ok(f64::from(ms))
            }
            #[cfg(feature = "cuda")]
            _ => anyhow::bail!("the marks are of different clocks"),
        }
    }
}
