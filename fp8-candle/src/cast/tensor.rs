//! A tensor in 8-bit floating point: codes, format, and the scales that give the codes their values.

use crate::base::check::{check_device, check_dtype};
use crate::base::data::matrix_dims;
use crate::base::data::storage::take_storage;
use crate::base::error::{Error, Result, internal, shape_error};
use crate::device::multiply_values;
use crate::device::{Codes, GemmCodes, GemmOperand, GemmOutput, backend};
use candle_core::{DType, Device, Storage, Tensor};
use fp8_core::{Cast, Contraction, Format, Granularity, ScaleGrid};
use std::sync::OnceLock;

/// FP8 codes with their scales: `value = decode(code) * dequant_scale`.
///
/// The codes are a U8 tensor because candle has no dtype for three of the four formats and few operations for the
/// fourth. The tensor is never part of an autograd graph.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fp8_candle::{Fp8Tensor, Quantizer};
/// use fp8_core::{Contraction, Format, Granularity};
///
/// let x = Tensor::new(&[[0.5f32, -3.0], [7.0, 0.25]], &Device::Cpu)?;
/// let rowwise = Quantizer::dynamic(Format::E4M3, Granularity::Rowwise);
/// let x8 = Fp8Tensor::quantize(&x, &rowwise, Contraction::Cols)?;
/// assert_eq!(x8.codes().dtype(), DType::U8);
/// assert_eq!(x8.dequant_scale().dims(), [2, 1]); // one scale per row
///
/// let back = x8.dequantize(DType::F32)?;
/// let error = (back - &x)?.abs()?.max_all()?.to_scalar::<f32>()?;
/// assert!(error <= 7.0 / 16.0); // half a step of a 3-bit mantissa
/// # Ok::<(), fp8_candle::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Fp8Tensor {
    dims: Vec<usize>,
    /// In the shape `dims`. If a cast wrote only the transposed codes, made from them when first needed.
    codes: OnceLock<Tensor>,
    /// `[cols, rows]`, if the device's GEMM reads this layout.
    transposed: Option<Tensor>,
    format: Format,
    granularity: Granularity,
    contraction: Contraction,
    dequant_scale: Tensor,
}

/// A quantized tensor, and what the cast measured.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Quantized {
    /// Codes and dequant_scale.
    pub tensor: Fp8Tensor,
    /// f32 `[scale_rows, scale_cols]`, the factors before the cast. If `cast` divides, values were divided by the dequant_scale instead,
    /// and these are its reciprocals.
    pub quant_scale: Tensor,
    /// f32 amax per scale, if the cast measured it.
    pub amax: Option<Tensor>,
    /// The cast that was done, with the key of a stochastic rounding.
    pub cast: Cast,
}

impl Fp8Tensor {
    /// Combines existing codes and scales.
    ///
    /// `codes` is U8 of any shape; `dequant_scale` is f32 with as many elements as the granularity has scales,
    /// in row-major order of the grid, on the same device. With [`Granularity::Mx`] they are powers of two, as E8M0 holds them:
    /// a GPU that multiplies with E8M0 scales gives NaN for others.
    ///
    /// # Errors
    /// If a dtype, the number of scales or the device does not fit.
    pub fn from_parts(
        codes: Tensor,
        format: Format,
        granularity: Granularity,
        contraction: Contraction,
        dequant_scale: Tensor,
    ) -> Result<Self> {
        const OP: &str = "Fp8Tensor::from_parts";
        check_dtype(OP, "codes", &codes, DType::U8)?;
        check_dtype(OP, "dequant_scale", &dequant_scale, DType::F32)?;
        check_device(OP, "dequant_scale", &dequant_scale, codes.device())?;
        let (rows, cols) = matrix_dims(codes.dims());
        let grid = granularity.grid(rows, cols, contraction);
        if dequant_scale.elem_count() != grid.len() {
            return Err(shape_error(
                OP,
                "dequant_scale",
                format!(
                    "{} elements ([{}, {}]) for codes of shape {:?} with {granularity} scales",
                    grid.len(),
                    grid.scale_rows(),
                    grid.scale_cols(),
                    codes.dims(),
                ),
                dequant_scale.dims(),
            ));
        }
        let dims = codes.dims().to_vec();
        let codes = Codes::row_major(codes.detach().contiguous()?);
        let scheme = (granularity, contraction);
        Self::from_codes(codes, &dims, format, scheme, dequant_scale)
    }

    /// The result of a cast of values of shape `dims`, as a [`Backend`](crate::device::Backend) gives it.
    ///
    /// # Errors
    /// If the number of scales does not match the granularity, or there are no codes.
    pub fn from_codes(
        codes: Codes,
        dims: &[usize],
        format: Format,
        (granularity, contraction): (Granularity, Contraction),
        dequant_scale: Tensor,
    ) -> Result<Self> {
        let (rows, cols) = matrix_dims(dims);
        let grid = granularity.grid(rows, cols, contraction);
        let dequant_scale = dequant_scale
            .detach()
            .contiguous()?
            .reshape((grid.scale_rows(), grid.scale_cols()))?;
        if codes.row_major.is_none() && codes.transposed.is_none() {
            internal!("a cast of {dims:?} values has written no codes");
        }
        Ok(Self {
            dims: dims.to_vec(),
            codes: codes.row_major.map(OnceLock::from).unwrap_or_default(),
            transposed: codes.transposed,
            format,
            granularity,
            contraction,
            dequant_scale,
        })
    }

    /// Reads candle's own FP8 tensor as E4M3 codes, bits unchanged.
    ///
    /// # Errors
    /// If `x` is not F8E4M3 or the scales do not fit.
    pub fn from_f8e4m3(
        x: &Tensor,
        granularity: Granularity,
        contraction: Contraction,
        dequant_scale: Tensor,
    ) -> Result<Self> {
        check_dtype("Fp8Tensor::from_f8e4m3", "the tensor", x, DType::F8E4M3)?;
        let codes = backend(x.device())?.f8e4m3_to_codes(x)?;
        Self::from_parts(codes, Format::E4M3, granularity, contraction, dequant_scale)
    }

    /// The codes as candle's F8E4M3, bits unchanged, without the scales.
    ///
    /// # Errors
    /// If the format is not E4M3.
    pub fn to_f8e4m3(&self) -> Result<Tensor> {
        if self.format != Format::E4M3 {
            return Err(Error::NoDType {
                op: "Fp8Tensor::to_f8e4m3",
                got: self.format,
            });
        }
        backend(self.device())?.codes_to_f8e4m3(self.codes())
    }

    /// `decode(code) * dequant_scale` in f32, then rounded to `dtype` (f32, bf16, f16 or f64).
    pub fn dequantize(&self, dtype: DType) -> Result<Tensor> {
        backend(self.device())?.dequantize(
            self.codes(),
            self.format,
            &self.grid(),
            &self.dequant_scale,
            dtype,
        )
    }

    /// The same codes, whose one dequant_scale is multiplied by `factor`; tensorwise tensors only.
    pub(crate) fn with_dequant_factor(&self, factor: f32) -> Result<Self> {
        if self.granularity != Granularity::Tensorwise {
            internal!(
                "one dequant_scale for codes with {} scales",
                self.granularity
            );
        }
        Ok(Self {
            dequant_scale: (&self.dequant_scale * f64::from(factor))?,
            ..self.clone()
        })
    }

    /// The same tensor on another device.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        Ok(Self {
            codes: OnceLock::from(self.codes().to_device(device)?),
            dims: self.dims.clone(),
            transposed: None,
            dequant_scale: self.dequant_scale.to_device(device)?,
            ..*self
        })
    }

    /// U8 codes in the logical shape. If the cast wrote only their transpose, for a GEMM that reads it, the first call
    /// makes a copy and keeps it.
    pub fn codes(&self) -> &Tensor {
        self.codes.get_or_init(|| {
            self.row_major()
                .expect("transposed codes that the device wrote are transposed back")
        })
    }

    fn row_major(&self) -> Result<Tensor> {
        match &self.transposed {
            Some(transposed) => Ok(backend(self.device())?
                .transpose(transposed)?
                .reshape(self.dims.as_slice())?),
            None => internal!("an FP8 tensor without codes"),
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

    /// The matrix dimension along which rowwise and MX scales run.
    pub fn contraction(&self) -> Contraction {
        self.contraction
    }

    /// f32 `[scale_rows, scale_cols]`, multiplied in after decoding.
    pub fn dequant_scale(&self) -> &Tensor {
        &self.dequant_scale
    }

    /// Logical shape.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Device of codes and scales.
    pub fn device(&self) -> &Device {
        self.dequant_scale.device()
    }

    /// Bytes of codes and scales.
    pub fn size_in_bytes(&self) -> usize {
        let copies = [self.codes.get(), self.transposed.as_ref()];
        let codes: usize = copies.into_iter().flatten().map(Tensor::elem_count).sum();
        codes + 4 * self.dequant_scale.elem_count()
    }

    /// Which scale belongs to which element of `[product of the leading dims, last dim]`.
    pub fn grid(&self) -> ScaleGrid {
        let (rows, cols) = matrix_dims(&self.dims);
        self.granularity.grid(rows, cols, self.contraction)
    }

    /// This tensor as an operand of a GEMM that sums over `contraction`.
    pub fn operand(&self, contraction: Contraction) -> GemmOperand<'_> {
        let codes = match (contraction, &self.transposed, self.codes.get()) {
            (Contraction::Rows, Some(transposed), _) | (_, Some(transposed), None) => {
                GemmCodes::Transposed(transposed)
            }
            _ => GemmCodes::RowMajor(self.codes()),
        };
        GemmOperand {
            codes,
            format: self.format,
            grid: self.grid(),
            dequant_scale: &self.dequant_scale,
            powers_of_two: self.granularity == Granularity::Mx,
            contraction,
        }
    }
}

/// A product of two FP8 matrices, by the backend or, emulated, by dequantizing and multiplying in f32.
pub(crate) fn multiply(
    (a, a_contraction): (&Fp8Tensor, Contraction),
    (b, b_contraction): (&Fp8Tensor, Contraction),
    out: &GemmOutput<'_>,
    emulate: bool,
) -> Result<Storage> {
    if !emulate {
        return backend(a.device())?.gemm(
            &a.operand(a_contraction),
            &b.operand(b_contraction),
            out,
        );
    }
    let matrix = |x: &Fp8Tensor| {
        let dims = matrix_dims(x.dims());
        Ok::<_, Error>(x.dequantize(DType::F32)?.reshape(dims)?)
    };
    let (a, b) = (matrix(a)?, matrix(b)?);
    let y = multiply_values((&a, a_contraction), (&b, b_contraction))?;
    take_storage(add_bias(y.to_dtype(out.dtype)?, out.bias)?)
}

/// `y + bias`, if there is one.
pub(crate) fn add_bias(y: Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    match bias {
        None => Ok(y),
        Some(bias) => Ok(y.broadcast_add(bias)?),
    }
}
