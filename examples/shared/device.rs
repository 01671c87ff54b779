//! The device that an example runs on.

use anyhow::{Context, Result};
use candle_core::Device;
use clap::ValueEnum;
use fp8::fp8_candle::device::open_cuda_untracked;

/// What `--device` takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DeviceName {
    /// The processor
    #[default]
    Cpu,
    /// The first NVIDIA GPU, in a build with `--features cuda`
    Cuda,
}

impl DeviceName {
    /// Fails where there is no such device, or the build has no support for it.
    pub fn open(self) -> Result<Device> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda => {
                // SAFETY: the only CUDA device of an example, none of which asks for its stream.
                let device = unsafe { open_cuda_untracked(0) };
                device
                    .context("--device cuda takes an NVIDIA GPU and a build with `--features cuda`")
            }
        }
    }
}
