//! cuBLASLt: descriptors that free themselves, the choice of an algorithm, and an FP8 product.
//!
//! candle owns a cuBLAS handle per device, and a cuBLAS handle is valid as a cuBLASLt handle (cuBLAS documentation,
//! "cublasLtHandle_t"), so none is created here. The workspace of each product comes from the stream's memory pool: candle
//! has a stream per thread, and a workspace kept with the handle would be shared between streams.

use super::gpu::Gpu;
use crate::base::error::{Error, Result};
use crate::base::sync::lock;
use candle_core::DType;
use cudarc::cublas::sys::cublasOperation_t;
use cudarc::cublaslt::result as lt;
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t::CUBLAS_COMPUTE_32F, cublasLtEpilogue_t, cublasLtMatmulAlgo_t,
    cublasLtMatmulDescAttributes_t as Attribute,
    cublasLtMatmulPreferenceAttributes_t as Preference, cudaDataType_t,
};
use fp8_core::Format;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Mutex;

/// How the scales of an operand are laid out, with cuBLASLt's numbers (some are newer than cudarc's headers).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
pub(super) enum ScaleMode {
    /// One f32.
    Scalar = 0,
    /// One E8M0 code per 1x32 values along the sum.
    Mx32 = 2,
    /// One f32 for each kept index.
    OuterVector = 3,
    /// One f32 per 1x128 values along the sum.
    Vector128 = 4,
    /// One f32 per 128x128 values.
    Block128 = 5,
}

impl ScaleMode {
    /// Whether scales change along the sum.
    pub(super) fn is_block(self) -> bool {
        matches!(self, Self::Mx32 | Self::Vector128 | Self::Block128)
    }
}

/// An operand as cuBLASLt sees it: `[kept, contracted]`, the sum contiguous.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operand {
    pub(super) codes: u64,
    pub(super) format: Format,
    pub(super) kept: usize,
    pub(super) dequant_scale: u64,
    pub(super) mode: ScaleMode,
}

/// `out [a.kept, b.kept] = a b^T`, row-major.
#[derive(Debug, Clone, Copy)]
pub(super) struct Product {
    pub(super) a: Operand,
    pub(super) b: Operand,
    pub(super) contracted: usize,
    pub(super) out: u64,
    pub(super) dtype: DType,
    /// `[b.kept]` in `dtype`, 0 for none. Added in f32 before the only rounding.
    pub(super) bias: u64,
    /// Not with block scales, which the library refuses it for.
    pub(super) fast_accum: bool,
}

/// Everything that an algorithm depends on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    chip: usize,
    sizes: [usize; 3],
    formats: [Format; 2],
    modes: [ScaleMode; 2],
    dtype: DType,
    bias: bool,
    fast_accum: bool,
    alignments: [u32; 3],
}

/// An algorithm and the bytes of workspace it needs; None if the library does not support the product.
#[derive(Clone)]
struct Choice(Option<(cublasLtMatmulAlgo_t, usize)>);

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

/// A cuBLASLt descriptor and the function that frees it.
struct Owned<T: Copy>(T, unsafe fn(T) -> std::result::Result<(), lt::CublasError>);

impl<T: Copy> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: made by the counterpart of this destroyer, and freed only here.
        let _ = unsafe { (self.1)(self.0) };
    }
}

/// The descriptors of a product.
struct Descriptors {
    product: Owned<sys::cublasLtMatmulDesc_t>,
    a: Owned<sys::cublasLtMatrixLayout_t>,
    b: Owned<sys::cublasLtMatrixLayout_t>,
    d: Owned<sys::cublasLtMatrixLayout_t>,
}

type LtResult<T> = std::result::Result<T, lt::CublasError>;

/// Runs `product` on `gpu`'s stream; `Ok(false)` if the library does not support it. Every other refusal is an error: a
/// product that is computed in another, much slower way after a mistake of ours would pass every test of its values.
///
/// # Safety
/// The addresses must be of memory on `gpu` as [`Product`] describes it, alive until the stream has run the product.
pub(super) unsafe fn multiply(gpu: &Gpu, product: &Product) -> Result<bool> {
    let failed = |status: lt::CublasError| -> Error {
        Error::Gemm {
            version: version(),
            problem: describe(product),
            chip: gpu.chip_name().to_string(),
            status: status_text(status.0),
        }
    };
    let descriptors = Descriptors::new(product).map_err(failed)?;
    let key = Key::new(gpu, product);
    let remembered = {
        let choices = lock(&CHOICES);
        choices
            .as_ref()
            .and_then(|choices| choices.get(&key).cloned())
    };
    let blas = gpu.device().cublas_handle();
    let handle: sys::cublasLtHandle_t = (*blas.handle()).cast();
    let choice = match remembered {
        Some(choice) => choice,
        None => {
            let found = descriptors.algorithm(handle, most_workspace(gpu), &key.alignments);
            let choice = match found {
                Ok(found) => Choice(Some(found)),
                Err(lt::CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) => {
                    Choice(None)
                }
                Err(status) => return Err(failed(status)),
            };
            let mut choices = lock(&CHOICES);
            let choices = choices.get_or_insert_default();
            if choices.len() >= MOST_CHOICES {
                choices.clear();
            }
            choices.insert(key, choice.clone());
            choice
        }
    };
    let Some((algorithm, workspace_len)) = choice.0 else {
        return Ok(false);
    };
    let workspace = match workspace_len {
        0 => None,
        len => Some(gpu.alloc(DType::U8, len)?),
    };
    let workspace_ptr = workspace.as_ref().map_or(0, super::gpu::Buffer::ptr);
    let (alpha, beta) = (1f32, 0f32);
    // SAFETY: handle and descriptors are alive; the caller guarantees the operands' addresses; alpha and beta are read before
    // the call returns (host pointer mode); the workspace is freed in stream order, after the product.
    unsafe {
        lt::matmul(
            handle,
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
    }
    .map_err(failed)?;
    Ok(true)
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
            formats: [product.a.format, product.b.format],
            modes: [product.a.mode, product.b.mode],
            dtype: product.dtype,
            bias: product.bias != 0,
            fast_accum: product.fast_accum,
            alignments: [product.b.codes, product.a.codes, product.out].map(alignment),
        }
    }
}

impl Descriptors {
    fn new(product: &Product) -> LtResult<Self> {
        let (a, b) = (&product.b, &product.a);
        let k = product.contracted;
        let layout = |dtype, rows: usize, cols: usize| -> LtResult<_> {
            let layout = lt::create_matrix_layout(dtype, rows as u64, cols as u64, rows as i64)?;
            Ok(Owned(layout, lt::destroy_matrix_layout))
        };
        let descriptors = Self {
            product: Owned(
                lt::create_matmul_desc(CUBLAS_COMPUTE_32F, cudaDataType_t::CUDA_R_32F)?,
                lt::destroy_matmul_desc,
            ),
            a: layout(fp8_type(a.format), k, a.kept)?,
            b: layout(fp8_type(b.format), k, b.kept)?,
            d: layout(float_type(product.dtype), a.kept, b.kept)?,
        };
        let transpose = cublasOperation_t::CUBLAS_OP_T as i32;
        let keep = cublasOperation_t::CUBLAS_OP_N as i32;
        descriptors.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, transpose)?;
        descriptors.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, keep)?;
        descriptors.set(
            Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
            a.dequant_scale,
        )?;
        descriptors.set(
            Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
            b.dequant_scale,
        )?;
        if (a.mode, b.mode) != (ScaleMode::Scalar, ScaleMode::Scalar) {
            descriptors.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, a.mode as i32)?;
            descriptors.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, b.mode as i32)?;
        }
        let fast_accum = i8::from(product.fast_accum);
        descriptors.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, fast_accum)?;
        if product.bias != 0 {
            let epilogue = cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            descriptors.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)?;
            descriptors.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.bias)?;
            let dtype = float_type(product.dtype) as i32;
            descriptors.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, dtype)?;
        }
        Ok(descriptors)
    }

    fn set<T: Copy>(&self, attribute: Attribute, value: T) -> LtResult<()> {
        // SAFETY: the descriptor is alive; the library copies size_of::<T>() bytes, the size of this attribute.
        unsafe {
            lt::set_matmul_desc_attribute(
                self.product.0,
                attribute,
                (&raw const value).cast(),
                size_of::<T>(),
            )
        }
    }

    fn algorithm(
        &self,
        handle: sys::cublasLtHandle_t,
        workspace: usize,
        alignments: &[u32; 3],
    ) -> LtResult<(cublasLtMatmulAlgo_t, usize)> {
        let preference = Owned(lt::create_matmul_pref()?, lt::destroy_matmul_pref);
        let set = |attribute, value: *const c_void, len| {
            // SAFETY: the preference is alive; the library copies `len` bytes from a value that is too.
            unsafe { lt::set_matmul_pref_attribute(preference.0, attribute, value, len) }
        };
        let most = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        set(most, (&raw const workspace).cast(), size_of::<usize>())?;
        let [a, b, d] = alignments;
        for (attribute, alignment) in [
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, a),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, b),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, d),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, d),
        ] {
            set(
                attribute,
                (alignment as *const u32).cast(),
                size_of::<u32>(),
            )?;
        }
        // SAFETY: all of them are alive.
        let found = unsafe {
            lt::get_matmul_algo_heuristic(
                handle,
                self.product.0,
                self.a.0,
                self.b.0,
                self.d.0,
                self.d.0,
                preference.0,
            )
        }?;
        Ok((found.algo, found.workspaceSize))
    }
}

fn fp8_type(format: Format) -> cudaDataType_t {
    match format {
        Format::E5M2 | Format::E5M2Fnuz => cudaDataType_t::CUDA_R_8F_E5M2,
        Format::E4M3 | Format::E4M3Fnuz => cudaDataType_t::CUDA_R_8F_E4M3,
    }
}

fn float_type(dtype: DType) -> cudaDataType_t {
    match dtype {
        DType::BF16 => cudaDataType_t::CUDA_R_16BF,
        DType::F16 => cudaDataType_t::CUDA_R_16F,
        _ => cudaDataType_t::CUDA_R_32F,
    }
}

/// A description of a product, for messages.
pub(super) fn describe(product: &Product) -> String {
    format!(
        "[{}, {}] {} x [{}, {}] {} -> {}, scales {:?} x {:?}",
        product.a.kept,
        product.contracted,
        product.a.format,
        product.b.kept,
        product.contracted,
        product.b.format,
        product.dtype.as_str(),
        product.a.mode,
        product.b.mode,
    )
}
