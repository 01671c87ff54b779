//! Kernels as the driver has loaded them, each once for a GPU.

use super::gpu::Gpu;
use super::kernels::{Kernel, Module, Shape};
use crate::base::error::Result;
use crate::base::sync::lock;
use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as MAX_SHARED;
use candle_core::cuda_backend::cudarc::driver::{CudaFunction, CudaModule};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// Dynamic shared memory that every kernel may use without asking.
const SHARED_FOR_ALL: u32 = 48 << 10;

/// A function of a loaded module.
#[derive(Debug)]
pub(super) struct Loaded {
    function: CudaFunction,
    /// Bytes of dynamic shared memory that it may use.
    shared: AtomicU32,
    /// Blocks that are on a multiprocessor at once; 0 before the first query. Each kernel is always launched with the same threads
    /// and shared memory.
    per_multiprocessor: AtomicU32,
}

impl Loaded {
    /// How many blocks of `shape` are on the chip at once.
    pub(super) fn resident(&self, gpu: &Gpu, shape: Shape) -> Result<u32> {
        let mut blocks = self.per_multiprocessor.load(Ordering::Relaxed);
        if blocks == 0 {
            blocks = self
                .function
                .occupancy_max_active_blocks_per_multiprocessor(
                    shape.threads,
                    shape.shared as usize,
                    None,
                )
                .map_err(candle_core::Error::wrap)?
                .max(1);
            self.per_multiprocessor.store(blocks, Ordering::Relaxed);
        }
        Ok(blocks.saturating_mul(u32::try_from(gpu.multiprocessors()).unwrap_or(1)))
    }

    /// The function, allowed to use `bytes` of dynamic shared memory.
    pub(super) fn with_shared(&self, bytes: u32) -> Result<&CudaFunction> {
        if bytes > self.shared.load(Ordering::Acquire) {
            self.function
                .set_attribute(MAX_SHARED, bytes as i32)
                .map_err(candle_core::Error::wrap)?;
            self.shared.fetch_max(bytes, Ordering::Release);
        }
        Ok(&self.function)
    }
}

/// By ordinal of the GPU and name. All devices of candle on a GPU share the driver's primary context, and a loaded module keeps
/// that alive, so functions serve every one of them.
#[derive(Default)]
struct Cache {
    modules: HashMap<(usize, &'static str), Arc<CudaModule>>,
    functions: HashMap<(usize, &'static str), Arc<Loaded>>,
}

static CACHE: Mutex<Option<Cache>> = Mutex::new(None);

/// `kernel` on `gpu`, loaded if it was not used before.
pub(super) fn function(gpu: &Gpu, kernel: &Kernel) -> Result<Arc<Loaded>> {
    let ordinal = gpu.stream().context().ordinal();
    let mut cache = lock(&CACHE);
    let cache = cache.get_or_insert_default();
    if let Some(loaded) = cache.functions.get(&(ordinal, kernel.name)) {
        return Ok(loaded.clone());
    }
    let module = match cache.modules.get(&(ordinal, kernel.module.name)) {
        Some(module) => module.clone(),
        None => {
            let module = load(gpu, kernel.module)?;
            cache
                .modules
                .insert((ordinal, kernel.module.name), module.clone());
            module
        }
    };
    let function = module.load_function(kernel.name).map_err(|error| {
        candle_core::Error::wrap(error).context(format!("kernel {}", kernel.name))
    })?;
    let loaded = Arc::new(Loaded {
        function,
        shared: SHARED_FOR_ALL.into(),
        per_multiprocessor: 0.into(),
    });
    cache
        .functions
        .insert((ordinal, kernel.name), loaded.clone());
    Ok(loaded)
}

/// The machine code of `module` for the chip, or if there is none, or the driver does not take it, the PTX.
fn load(gpu: &Gpu, module: &Module) -> Result<Arc<CudaModule>> {
    let stream = gpu.stream();
    let context = stream.context();
    let refused = match module.cubin(gpu.capability()) {
        Some(cubin) => match context.load_module(Ptx::from_binary(cubin.to_vec())) {
            Ok(loaded) => return Ok(loaded),
            Err(error) => format!("; its machine code: {error}"),
        },
        None => String::new(),
    };
    context
        .load_module(Ptx::from_src(module.ptx(gpu.capability())))
        .map_err(|error| {
            let module = format!("the PTX of module {}{refused}", module.name);
            candle_core::Error::wrap(error).context(module).into()
        })
}

impl Module {
    /// The PTX for a chip of `capability`.
    fn ptx(&self, capability: (i32, i32)) -> &'static str {
        match capability {
            (9, 0) => self.ptx[2],
            newer if newer >= (8, 9) => self.ptx[1],
            _ => self.ptx[0],
        }
    }

    /// The machine code for a chip of `capability`: that of its major number and of at most its minor one.
    fn cubin(&self, capability: (i32, i32)) -> Option<&'static [u8]> {
        let cubin = match capability {
            (8, 0..=8) => self.cubins[0],
            (8, _) => self.cubins[1],
            (9, 0) => self.cubins[2],
            (10, _) => self.cubins[3],
            (12, _) => self.cubins[4],
            _ => &[],
        };
        (!cubin.is_empty()).then_some(cubin)
    }
}
