//! A product by cuBLASLt: the choice of an algorithm, and the call.
//!
//! candle owns a cuBLAS handle per device, and a cuBLAS handle is valid as a cuBLASLt handle (cuBLAS documentation,
//! "cublasLtHandle_t"), so none is created here. The workspace of each product comes from the stream's memory pool: candle
//! has a stream per thread, and a workspace kept with the handle would be shared between streams.

use super::descriptors::Descriptors;
use super::gpu::Gpu;
use super::product::{Element, Product, ScaleMode, describe};
use super::race::{is_recording, race, shows_order};
use super::trial::Trial;
use crate::base::error::{Error, Result};
use crate::base::sync::lock;
use candle_core::DType;
use cudarc::cublaslt::result as lt;
use cudarc::cublaslt::sys::{self, cublasLtMatmulAlgo_t};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Mutex;

/// Everything that an algorithm depends on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    chip: usize,
    sizes: [usize; 3],
    elements: [Element; 2],
    modes: [ScaleMode; 2],
    dtype: DType,
    bias: bool,
    fast_accum: bool,
    alignments: [u32; 3],
}

/// An algorithm and the bytes of workspace it needs.
type Algorithm = (cublasLtMatmulAlgo_t, usize);

/// The algorithm of a product; None if the library does not support the product.
#[derive(Clone)]
struct Choice(Option<Algorithm>);

// SAFETY: an algorithm is plain data, valid on any thread.
unsafe impl Send for Choice {}

static CHOICES: Mutex<Option<HashMap<Key, Choice>>> = Mutex::new(None);

/// The most shapes to remember; a program with more of them keeps changing shapes.
const MOST_CHOICES: usize = 8192;

/// The most workspace that an algorithm may use, as recommended by NVIDIA.
fn most_workspace(gpu: &Gpu) -> usize {
    if gpu.capability().0 >= 9 {
        32 << 20
    } else {
        4 << 20
    }
}

/// The library's version: 120900 is 12.9.
pub(super) fn version() -> usize {
    // SAFETY: takes nothing, returns a number.
    unsafe { sys::cublasLtGetVersion() }
}

/// Runs `product` on `gpu`'s stream; `Ok(false)` if the library does not support it. Every other refusal is an error: a
/// product that is computed in another, much slower way after a mistake of ours would pass every test of its values.
///
/// # Safety
/// The addresses must be of memory on `gpu` as [`Product`] describes it, alive until the stream has run the product.
pub(super) unsafe fn multiply(gpu: &Gpu, product: &Product) -> Result<bool> {
    let descriptors = Descriptors::new(product).map_err(|status| failed(gpu, product, status))?;
    let key = Key::new(gpu, product);
    let remembered = {
        let choices = lock(&CHOICES);
        choices
            .as_ref()
            .and_then(|choices| choices.get(&key).cloned())
    };
    let choice = match remembered {
        Some(choice) => choice,
        None => {
            let found = algorithms(gpu, product, &descriptors, &key)?;
            let len = product.a.kept * product.b.kept;
            let races = found.len() > 1 && shows_order(product.dtype, len);
            let (winner, lasts) = match races {
                true if is_recording(gpu)? => (0, false),
                // SAFETY: the caller guarantees that the result's memory is there, and it is not used yet.
                true => (unsafe { fastest(gpu, product, &found)? }, true),
                false => (0, true),
            };
            let choice = Choice(found.get(winner).copied());
            if lasts {
                let mut choices = lock(&CHOICES);
                let choices = choices.get_or_insert_default();
                if choices.len() >= MOST_CHOICES {
                    choices.clear();
                }
                choices.insert(key, choice.clone());
            }
            choice
        }
    };
    let Some(algorithm) = choice.0 else {
        return Ok(false);
    };
    // SAFETY: the caller's promise.
    unsafe { run(gpu, product, &descriptors, &algorithm)? };
    Ok(true)
}

/// What the library proposes for `product`; nothing if it does not support it.
fn algorithms(
    gpu: &Gpu,
    product: &Product,
    descriptors: &Descriptors,
    key: &Key,
) -> Result<Vec<Algorithm>> {
    match descriptors.algorithms(handle(gpu), most_workspace(gpu), &key.alignments) {
        Err(lt::CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) => Ok(vec![]),
        found => found.map_err(|status| failed(gpu, product, status)),
    }
}

/// The index of the algorithm that is fastest for products like this one; the first if there is no memory to try them.
///
/// # Safety
/// Nothing else may use the memory of the result, which is overwritten.
unsafe fn fastest(gpu: &Gpu, product: &Product, found: &[Algorithm]) -> Result<usize> {
    let Ok(trial) = Trial::new(gpu, product) else {
        return Ok(0);
    };
    let product = &trial.product;
    let descriptors = Descriptors::new(product).map_err(|status| failed(gpu, product, status))?;
    let len = product.a.kept * product.b.kept * product.dtype.size_in_bytes();
    // SAFETY: the operands of the trial are as its product says.
    let run = |index: usize| unsafe { run(gpu, product, &descriptors, &found[index]) };
    // SAFETY: the caller's promise.
    unsafe { race(gpu, found.len(), (product.out, len), run) }
}

/// Launches `product` with this algorithm.
///
/// # Safety
/// As [`multiply`].
unsafe fn run(
    gpu: &Gpu,
    product: &Product,
    descriptors: &Descriptors,
    &(algorithm, workspace_len): &Algorithm,
) -> Result<()> {
    let workspace = match workspace_len {
        0 => None,
        len => Some(gpu.alloc(DType::U8, len)?),
    };
    let workspace_ptr = workspace.as_ref().map_or(0, super::gpu::Buffer::ptr);
    let (alpha, beta) = (1f32, 0f32);
    // SAFETY: handle and descriptors are alive; the caller guarantees the operands' addresses; alpha and beta are read before
    // the call returns (host pointer mode); the workspace is freed in stream order, after the product.
    let done = unsafe {
        lt::matmul(
            handle(gpu),
            descriptors.product.0,
            (&raw const alpha).cast(),
            (&raw const beta).cast(),
            // The library is column-major: it computes the transpose of the result.
            product.b.codes as *const c_void,
            descriptors.a.0,
            product.a.codes as *const c_void,
            descriptors.b.0,
            product.out as *const c_void,
            descriptors.d.0,
            product.out as *mut c_void,
            descriptors.d.0,
            &raw const algorithm,
            workspace_ptr as *mut c_void,
            workspace_len,
            gpu.stream().cu_stream().cast(),
        )
    };
    done.map_err(|status| failed(gpu, product, status))
}

/// candle keeps the handle as long as the device.
fn handle(gpu: &Gpu) -> sys::cublasLtHandle_t {
    (*gpu.device().cublas_handle().handle()).cast()
}

/// The error of a call that the library has refused.
fn failed(gpu: &Gpu, product: &Product, status: lt::CublasError) -> Error {
    Error::Gemm {
        version: version(),
        problem: describe(product),
        chip: gpu.chip_name().to_string(),
        status: status_text(status.0),
    }
}

/// Name of a status and what the library says of it.
fn status_text(status: sys::cublasStatus_t) -> String {
    // SAFETY: the library returns a C string that lives as long as it does, for any status.
    let text = unsafe { std::ffi::CStr::from_ptr(sys::cublasLtGetStatusString(status)) };
    format!("{status:?}: {}", text.to_string_lossy())
}

impl Key {
    fn new(gpu: &Gpu, product: &Product) -> Self {
        let alignment = |ptr: u64| 1u32 << ptr.trailing_zeros().min(8);
        Self {
            chip: gpu.stream().context().ordinal(),
            sizes: [product.a.kept, product.b.kept, product.contracted],
            elements: [product.a.element, product.b.element],
            modes: [product.a.mode, product.b.mode],
            dtype: product.dtype,
            bias: product.bias != 0,
            fast_accum: product.fast_accum,
            alignments: [product.b.codes, product.a.codes, product.out].map(alignment),
        }
    }
}
