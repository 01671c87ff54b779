//! A training step on a GPU copies nothing to the host and waits for nothing until a number is asked for.
//!
//! In this program the functions of the driver that copy to the host or wait are replaced by ones that count and then call
//! the driver's own.

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{Optimizer, VarBuilder, VarMap};
use fp8::fp8_candle::ops::cross_entropy;
use fp8::nn::{LayerNorm, Linear, layer_norm, linear};
use fp8::optim::{AdamW, AdamWConfig};
use fp8::{Fp8Module, fp8_autocast, prepare_fp8};
use fp8_test_support::{device, skipped_on_cpu};
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

static COPIES: AtomicUsize = AtomicUsize::new(0);
static WAITS: AtomicUsize = AtomicUsize::new(0);

/// The driver's own function.
fn driver(name: &CStr) -> *mut c_void {
    // SAFETY: names are C strings; the library stays loaded.
    unsafe {
        let folder = std::env::var("CUDA_LIB_DIR").unwrap_or_default();
        let there = std::ffi::CString::new(format!("{folder}/libcuda.so.1")).unwrap_or_default();
        let mut library = libc::dlopen(there.as_ptr(), libc::RTLD_LAZY);
        if library.is_null() {
            library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY);
        }
        assert!(!library.is_null(), "libcuda.so.1 cannot be opened");
        let function = libc::dlsym(library, name.as_ptr());
        assert!(!function.is_null(), "{name:?} is not in libcuda.so.1");
        function
    }
}

/// Replaces a function of the driver with one that counts its calls.
macro_rules! counted {
    ($counter:ident, $name:ident($($argument:ident: $type:ty),*)) => {
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $type),*) -> i32 {
            $counter.fetch_add(1, SeqCst);
            let name = concat!(stringify!($name), "\0").as_bytes();
            let name = CStr::from_bytes_with_nul(name).expect("a C string");
            // SAFETY: the driver's function of this name has these parameters.
            let own: extern "C" fn($($type),*) -> i32 = unsafe { std::mem::transmute(driver(name)) };
            own($($argument),*)
        }
    };
}

counted!(COPIES, cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize));
counted!(COPIES, cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: *mut c_void));
counted!(WAITS, cuStreamSynchronize(stream: *mut c_void));
counted!(WAITS, cuCtxSynchronize());
counted!(WAITS, cuEventSynchronize(event: *mut c_void));

#[derive(Fp8Module)]
struct Net {
    up: Linear,
    norm: LayerNorm,
    down: Linear,
}

impl Net {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.norm.forward(&self.up.forward(x)?)?;
        self.down.forward(&fp8::fp8_candle::ops::gelu(&x)?)
    }
}

#[test]
fn a_step_copies_nothing_to_the_host() -> Result<()> {
    if skipped_on_cpu() {
        return Ok(());
    }
    let device = device();
    let counts = || (COPIES.load(SeqCst), WAITS.load(SeqCst));
    // The counters work.
    let before = counts();
    Tensor::ones(4, DType::F32, &device)?.to_vec1::<f32>()?;
    assert!(counts().0 > before.0, "a copy that was not counted");

    for recipe in ["delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp"] {
        for dtype in [DType::F32, DType::BF16] {
            let vars = VarMap::new();
            let vb = VarBuilder::from_varmap(&vars, dtype, &device);
            let net = Net {
                up: linear(32, 64, vb.pp("up"))?,
                norm: layer_norm(64, 1e-5, vb.pp("norm"))?,
                down: linear(64, 16, vb.pp("down"))?,
            };
            prepare_fp8(&net, &Default::default())?;
            let config = AdamWConfig {
                max_grad_norm: Some(1.),
                ..Default::default()
            };
            let mut optimizer = AdamW::from_varmap(&vars, config)?;
            let x = Tensor::from_vec(
                (0..48 * 32).map(|i| (i as f32 * 0.7).sin()).collect(),
                (48, 32),
                &Device::Cpu,
            )?
            .to_dtype(dtype)?
            .to_device(&device)?;
            let targets: Vec<u32> = (0..48).map(|i| i % 16).collect();
            let targets = Tensor::from_vec(targets, 48, &device)?;
            let mut step = || -> Result<Tensor> {
                let _guard = fp8_autocast(recipe.parse::<fp8::Recipe>().expect("a recipe"))?;
                let loss = cross_entropy(&net.forward(&x)?, &targets)?;
                optimizer.step(&loss.backward()?)?;
                Ok(loss)
            };
            step()?;
            let before = counts();
            let mut last = step()?;
            for _ in 0..3 {
                last = step()?;
            }
            assert_eq!(
                counts(),
                before,
                "{recipe} {dtype:?}: copies, waits of four steps"
            );
            let loss = last.to_dtype(DType::F32)?.to_scalar::<f32>()?;
            assert!(
                loss.is_finite() && loss < 10.,
                "{recipe} {dtype:?}: loss {loss}"
            );
            assert_eq!(
                counts().0,
                before.0 + 1,
                "{recipe} {dtype:?}: copies for the loss"
            );
        }
    }
    Ok(())
}
