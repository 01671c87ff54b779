//! The device that an example runs on.

use anyhow::{Context, Result};
use candle_core::Device;
use clap::ValueEnum;

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
                let device = Device::new_cuda(0).context(
                    "--device cuda takes an NVIDIA GPU and a build with `--features cuda`",
                )?;
                fp8::fp8_candle::device::backend(&device)?;
                Ok(device)
            }
        }
    }
}
