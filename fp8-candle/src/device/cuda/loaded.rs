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

/// A loaded module, and the architecture whose machine code or PTX it is.
#[derive(Clone)]
struct Code {
    module: Arc<CudaModule>,
    architecture: &'static str,
}

/// By ordinal of the GPU and name. All devices of candle on a GPU share the driver's primary context, and a loaded module keeps
/// that alive, so functions serve every one of them.
#[derive(Default)]
struct Cache {
    modules: HashMap<(usize, &'static str), Code>,
    functions: HashMap<(usize, &'static str), Arc<Loaded>>,
}

impl Cache {
    /// `module` on `gpu`, loaded if it was not used before.
    fn code(&mut self, gpu: &Gpu, module: &'static Module) -> Result<Code> {
        let key = (gpu.stream().context().ordinal(), module.name);
        if let Some(code) = self.modules.get(&key) {
            return Ok(code.clone());
        }
        let code = load(gpu, module)?;
        self.modules.insert(key, code.clone());
        Ok(code)
    }
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
    let code = cache.code(gpu, kernel.module)?;
    let function = code.module.load_function(kernel.name).map_err(|error| {
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

/// The architecture whose machine code or PTX `gpu` runs of `module`: kernels that only one architecture has are launched by it.
pub(super) fn architecture(gpu: &Gpu, module: &'static Module) -> Result<&'static str> {
    let mut cache = lock(&CACHE);
    Ok(cache
        .get_or_insert_default()
        .code(gpu, module)?
        .architecture)
}

/// The machine code of `module` for the chip, or if there is none, or the driver does not take it, the PTX.
fn load(gpu: &Gpu, module: &Module) -> Result<Code> {
    let stream = gpu.stream();
    let context = stream.context();
    let refused = match module.cubin(gpu.capability()) {
        Some((architecture, cubin)) => {
            match context.load_module(Ptx::from_binary(cubin.to_vec())) {
                Ok(module) => {
                    return Ok(Code {
                        module,
                        architecture,
                    });
                }
                Err(error) => format!("; its machine code: {error}"),
            }
        }
        None => String::new(),
    };
    let Some(ptx) = module.ptx(gpu.capability()) else {
        let built: Vec<&str> = module.cubins.iter().map(|(arch, _)| *arch).collect();
        let (major, minor) = gpu.capability();
        return Err(candle_core::Error::Msg(format!(
            "{} has compute capability {major}.{minor}, and this program was built for {} alone{refused}: build with \
             FP8_CUDA_ARCHITECTURES unset",
            gpu.chip_name(),
            built.join(", ")
        ))
        .into());
    };
    match context.load_module(Ptx::from_src(ptx)) {
        Ok(loaded) => Ok(Code {
            module: loaded,
            architecture: module.ptx.0,
        }),
        Err(error) => {
            let module = format!("the PTX of module {}{refused}", module.name);
            Err(candle_core::Error::wrap(error).context(module).into())
        }
    }
}

impl Module {
    /// The PTX, if a chip of `capability` can run it: that of 90a is for Hopper alone, any other for all newer chips.
    fn ptx(&self, capability: (i32, i32)) -> Option<&'static str> {
        let (arch, text) = self.ptx;
        let fits = match number(arch) {
            (of, true) => of == capability,
            (of, false) => of <= capability,
        };
        fits.then_some(text)
    }

    /// The machine code for a chip of `capability`, that of its major number and of at most its minor one, with its architecture.
    fn cubin(&self, capability: (i32, i32)) -> Option<(&'static str, &'static [u8])> {
        let mut fitting = self.cubins.iter().filter(|(arch, code)| {
            let (of, only) = number(arch);
            let runs = of.0 == capability.0 && of.1 <= capability.1;
            !code.is_empty() && if only { of == capability } else { runs }
        });
        fitting.next_back().copied()
    }
}

/// The compute capability of an architecture, and whether its code is for that one alone.
fn number(arch: &str) -> ((i32, i32), bool) {
    let digits = arch.trim_end_matches('a');
    let number: i32 = digits.parse().unwrap_or(0);
    ((number / 10, number % 10), digits != arch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chips_get_the_newest_code_that_they_run() {
        let module = Module {
            name: "fp8_test",
            ptx: ("89", "of 89"),
            cubins: &[
                ("80", b"80"),
                ("89", b"89"),
                ("90a", b"90a"),
                ("100", b"100"),
                ("120", b""),
            ],
            resources: "",
        };
        let cubin = |capability| module.cubin(capability);
        assert_eq!(cubin((8, 0)), Some(("80", b"80".as_slice())));
        assert_eq!(cubin((8, 6)), Some(("80", b"80".as_slice())));
        assert_eq!(cubin((8, 9)), Some(("89", b"89".as_slice())));
        assert_eq!(cubin((9, 0)), Some(("90a", b"90a".as_slice())));
        assert_eq!(cubin((10, 3)), Some(("100", b"100".as_slice())));
        assert_eq!(cubin((12, 0)), None);
        assert_eq!(module.ptx((12, 0)), Some("of 89"));
        assert_eq!(module.ptx((8, 0)), None);
        let hopper = Module {
            ptx: ("90a", "of 90a"),
            ..module
        };
        assert_eq!(hopper.ptx((9, 0)), Some("of 90a"));
        assert_eq!(hopper.ptx((10, 0)), None);
    }
}
