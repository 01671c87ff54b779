//! A frozen FP8 weight in the layout that its device reads fastest.

use crate::base::error::{Result, shape_error};
use crate::cast::tensor::Fp8Tensor;
use crate::device::{GemmCodes, GemmOperand, backend};
use candle_core::{DType, Device, Tensor};
use fp8_core::{Contraction, Format, Granularity, ScaleGrid};
use std::sync::OnceLock;

/// An FP8 weight `[N, K]` for GEMMs that sum over K, packed once for the kernels of its device.
///
/// It holds one copy of the codes: packed if the device has a packed layout (x86-64 CPUs with AVX2 do) and its kernels read all
/// codes, see [`Backend::pack`](crate::device::Backend::pack), otherwise row-major.
#[derive(Debug, Clone)]
pub struct PackedWeight {
    packed: Option<Tensor>,
    /// Row-major codes: the given ones if nothing is packed, otherwise made when first needed.
    codes: OnceLock<Fp8Tensor>,
    format: Format,
    granularity: Granularity,
    contraction: Contraction,
    dequant_scale: Tensor,
    sizes: [usize; 2],
}

impl PackedWeight {
    /// Packs `weight`, `[N, K]`.
    ///
    /// # Errors
    /// If `weight` is not a matrix, or its device has no backend.
    pub fn new(weight: &Fp8Tensor) -> Result<Self> {
        let &[n, k] = weight.dims() else {
            return Err(shape_error(
                "PackedWeight::new",
                "weight",
                "[out_features, in_features]",
                weight.dims(),
            ));
        };
        let packed = backend(weight.device())?.pack(weight.codes(), weight.format())?;
        let codes = OnceLock::new();
        if packed.is_none() {
            let _ = codes.set(weight.clone());
        }
        Ok(Self {
            packed,
            codes,
            format: weight.format(),
            granularity: weight.granularity(),
            contraction: weight.contraction(),
            dequant_scale: weight.dequant_scale().clone(),
            sizes: [n, k],
        })
    }

    /// The weight with row-major codes. If they are packed, the first call makes a copy and keeps it.
    pub fn codes(&self) -> &Fp8Tensor {
        self.codes.get_or_init(|| {
            self.unpack()
                .expect("codes that the device packed come back")
        })
    }

    /// The weight with row-major codes; a copy is not kept.
    ///
    /// # Errors
    /// If the device fails to copy.
    pub fn unpack(&self) -> Result<Fp8Tensor> {
        match (self.codes.get(), &self.packed) {
            (Some(codes), _) => Ok(codes.clone()),
            (None, Some(packed)) => {
                let [n, k] = self.sizes;
                Fp8Tensor::from_parts(
                    backend(self.device())?.unpack(packed, n, k)?,
                    self.format,
                    self.granularity,
                    self.contraction,
                    self.dequant_scale.clone(),
                )
            }
            (None, None) => unreachable!("a weight has codes in one form"),
        }
    }

    /// `decode(code) * dequant_scale` in f32, then rounded to `dtype` (f32, bf16, f16 or f64): `[N, K]`.
    ///
    /// # Errors
    /// If `dtype` is not one of these, or the device fails to copy.
    pub fn dequantize(&self, dtype: DType) -> Result<Tensor> {
        self.unpack()?.dequantize(dtype)
    }

    /// The codes as they are stored, packed or not: the same tensor as long as the weight lives.
    pub fn held(&self) -> &Tensor {
        match &self.packed {
            Some(packed) => packed,
            None => self.codes().codes(),
        }
    }

    /// Format of the codes.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Which elements share a scale.
    pub fn granularity(&self) -> Granularity {
        self.granularity
    }

    /// f32 `[scale_rows, scale_cols]`, multiplied in after decoding.
    pub fn dequant_scale(&self) -> &Tensor {
        &self.dequant_scale
    }

    /// `[N, K]`.
    pub fn dims(&self) -> &[usize] {
        &self.sizes
    }

    /// Device of codes and scales.
    pub fn device(&self) -> &Device {
        self.dequant_scale.device()
    }

    /// Bytes of the codes, in one layout or both, and of the scales.
    pub fn size_in_bytes(&self) -> usize {
        let packed = self.packed.as_ref().map_or(0, Tensor::elem_count);
        let codes = self.codes.get().map_or(0, |c| c.codes().elem_count());
        packed + codes + 4 * self.dequant_scale.elem_count()
    }

    /// This weight as operand B of a GEMM that sums over K.
    pub(crate) fn operand(&self) -> GemmOperand<'_> {
        let [n, k] = self.sizes;
        let grid: ScaleGrid = self.granularity.grid(n, k, self.contraction);
        GemmOperand {
            codes: match &self.packed {
                Some(packed) => GemmCodes::Packed(packed),
                None => GemmCodes::RowMajor(self.codes().codes()),
            },
            format: self.format,
            grid,
            dequant_scale: &self.dequant_scale,
            powers_of_two: self.granularity == Granularity::Mx,
            contraction: Contraction::Cols,
        }
    }
}
