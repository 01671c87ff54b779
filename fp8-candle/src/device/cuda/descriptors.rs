//! cuBLASLt's descriptors of a product, which free themselves, and the algorithms that it proposes for them.

use super::product::{Element, Operand, Product, ScaleMode};
use candle_core::DType;
use cudarc::cublas::sys::cublasOperation_t;
use cudarc::cublaslt::result as lt;
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t::CUBLAS_COMPUTE_32F, cublasLtEpilogue_t, cublasLtMatmulAlgo_t,
    cublasLtMatmulDescAttributes_t as Attribute,
    cublasLtMatmulPreferenceAttributes_t as Preference, cudaDataType_t,
};
use fp8_core::Format;
use std::ffi::c_void;
use std::mem::MaybeUninit;

/// A cuBLASLt descriptor and the function that frees it.
pub(super) struct Owned<T: Copy>(
    pub(super) T,
    unsafe fn(T) -> std::result::Result<(), lt::CublasError>,
);

impl<T: Copy> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: made by the counterpart of this destroyer, and freed only here.
        let _ = unsafe { (self.1)(self.0) };
    }
}

/// The descriptors of a product.
pub(super) struct Descriptors {
    pub(super) product: Owned<sys::cublasLtMatmulDesc_t>,
    pub(super) a: Owned<sys::cublasLtMatrixLayout_t>,
    pub(super) b: Owned<sys::cublasLtMatrixLayout_t>,
    pub(super) d: Owned<sys::cublasLtMatrixLayout_t>,
}

pub(super) type LtResult<T> = std::result::Result<T, lt::CublasError>;

impl Descriptors {
    pub(super) fn new(product: &Product) -> LtResult<Self> {
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
            a: layout(element_type(a.element), k, a.kept)?,
            b: layout(element_type(b.element), k, b.kept)?,
            d: layout(float_type(product.dtype), a.kept, b.kept)?,
        };
        let transpose = cublasOperation_t::CUBLAS_OP_T as i32;
        let keep = cublasOperation_t::CUBLAS_OP_N as i32;
        descriptors.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, transpose)?;
        descriptors.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, keep)?;
        if a.element != Element::Bf16 {
            descriptors.set_scales(a, b, product.fast_accum)?;
        }
        if product.bias != 0 {
            let epilogue = cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            descriptors.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)?;
            descriptors.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.bias)?;
            let dtype = float_type(product.dtype) as i32;
            descriptors.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, dtype)?;
        }
        Ok(descriptors)
    }

    /// What only FP8 products have.
    fn set_scales(&self, a: &Operand, b: &Operand, fast_accum: bool) -> LtResult<()> {
        self.set(
            Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
            a.dequant_scale,
        )?;
        self.set(
            Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
            b.dequant_scale,
        )?;
        if (a.mode, b.mode) != (ScaleMode::Scalar, ScaleMode::Scalar) {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, a.mode as i32)?;
            self.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, b.mode as i32)?;
        }
        self.set(
            Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM,
            i8::from(fast_accum),
        )
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

    /// The algorithms that the library proposes, the one that it expects to be the fastest first, and their bytes of workspace.
    pub(super) fn algorithms(
        &self,
        handle: sys::cublasLtHandle_t,
        workspace: usize,
        alignments: &[u32; 3],
    ) -> LtResult<Vec<(cublasLtMatmulAlgo_t, usize)>> {
        const MOST: usize = 8;
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
        let mut found =
            [const { MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::uninit() }; MOST];
        let mut count = 0;
        // SAFETY: all of them are alive, and there is room for as many results as are asked for.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.product.0,
                self.a.0,
                self.b.0,
                self.d.0,
                self.d.0,
                preference.0,
                MOST as i32,
                found.as_mut_ptr().cast(),
                &raw mut count,
            )
        };
        status.result()?;
        let found = found.iter().take(count.max(0) as usize);
        // SAFETY: the library has written `count` of them.
        let found = found.map(|found| unsafe { found.assume_init_ref() });
        let good = found.filter(|found| found.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        Ok(good
            .map(|found| (found.algo, found.workspaceSize))
            .collect())
    }
}

fn element_type(element: Element) -> cudaDataType_t {
    match element {
        Element::Fp8(Format::E5M2 | Format::E5M2Fnuz) => cudaDataType_t::CUDA_R_8F_E5M2,
        Element::Fp8(Format::E4M3 | Format::E4M3Fnuz) => cudaDataType_t::CUDA_R_8F_E4M3,
        Element::Bf16 => cudaDataType_t::CUDA_R_16BF,
    }
}

fn float_type(dtype: DType) -> cudaDataType_t {
    match dtype {
        DType::BF16 => cudaDataType_t::CUDA_R_16BF,
        DType::F16 => cudaDataType_t::CUDA_R_16F,
        _ => cudaDataType_t::CUDA_R_32F,
    }
}
