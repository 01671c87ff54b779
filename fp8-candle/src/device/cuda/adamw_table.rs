//! Addresses and sizes of an optimizer's tensors, as kernels read them: a table in device memory.

use super::gpu::{Buffer, Gpu};
use super::kernels::{Arg, Shape, kernels};
use super::launch::launch;
use super::recording::is_recorded;
use crate::base::error::Result;
use candle_core::DType;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};

kernels! { ADAMW_TABLE_KERNELS in ADAMW;
    WORDS = one "fp8_adamw_words"("plllllllllllllllll");
}

/// Words that a launch of [`WORDS`] carries.
const CARRIED: usize = 16;

/// Words on the device, uploaded again when they change.
#[derive(Debug, Default)]
pub(super) struct Table {
    host: Vec<u64>,
    device: Option<CudaSlice<u64>>,
}

/// Where the words of a step are.
pub(super) struct Place {
    pub(super) address: u64,
    /// Their memory, if only this step uses it.
    _own: Option<Buffer>,
}

impl Table {
    /// The place of `words`.
    pub(super) fn update(&mut self, gpu: &Gpu, words: Vec<u64>) -> Result<Place> {
        match &mut self.device {
            Some(_) if self.host == words => {}
            // A recorded copy would reread this vector in each run of the graph, whose words differ from those outside it: addresses
            // of tensors that only the graph has.
            _ if is_recorded(gpu.device().id()) => return carried(gpu, &words),
            // On the stream, launches that read the old words come before the copy.
            Some(device) if self.host.len() == words.len() => {
                self.host.clear();
                gpu.device().memcpy_htod(&words, device)?;
            }
            device => {
                self.host.clear();
                *device = Some(gpu.device().clone_htod(&words)?);
            }
        }
        self.host = words;
        let address = |device: &CudaSlice<u64>| device.device_ptr(gpu.stream()).0;
        Ok(Place {
            address: self.device.as_ref().map_or(0, address),
            _own: None,
        })
    }
}

/// The words in memory of this step, written by kernels that get them as arguments.
fn carried(gpu: &Gpu, words: &[u64]) -> Result<Place> {
    let own = gpu.alloc(DType::I64, words.len())?;
    for (i, part) in words.chunks(CARRIED).enumerate() {
        let to = own.ptr() + (i * CARRIED * size_of::<u64>()) as u64;
        let mut args = vec![Arg::Ptr(to), Arg::Len(part.len() as u64)];
        args.extend(part.iter().copied().map(Arg::Len));
        args.resize(2 + CARRIED, Arg::Len(0));
        // SAFETY: the words of this part lie within the buffer, which the stream frees after the launches that read it.
        unsafe { launch(gpu, &WORDS, Shape::blocks(1, 32), &args) }?;
    }
    Ok(Place {
        address: own.ptr(),
        _own: Some(own),
    })
}
