//! The device that a program runs on.

use anyhow::{Context, Result};
use candle_core::Device;
use clap::ValueEnum;
use fp8::fp8_candle::device::open_cuda_untracked;
use serde::{Deserialize, Serialize};
use std::sync::Mutex;

/// What `--device` takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceName {
    /// The processor
    #[default]
    Cpu,
    /// The first NVIDIA GPU, in a build with `--features cuda`
    Cuda,
}

/// The GPU, once it is open: a program opens it once.
static GPU: Mutex<Option<Device>> = Mutex::new(None);

impl DeviceName {
    /// Fails where there is no such device, or the build has no support for it.
    pub fn open(self) -> Result<Device> {
        if self == Self::Cpu {
            return Ok(Device::Cpu);
        }
        let mut gpu = GPU.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(gpu) = &*gpu {
            return Ok(gpu.clone());
        }
        // SAFETY: the only CUDA device of the program, which does not ask for its stream.
        let device = unsafe { open_cuda_untracked(0) };
        let device = device
            .context("--device cuda takes an NVIDIA GPU and a build with `--features cuda`")?;
        Ok(gpu.insert(device).clone())
    }
}
