//! Products of FP8 tensors and casts with a given scale: what delayed scaling by hand needs, without a layer, a state or gradients.

use crate::base::check::{check_device, check_dims, check_dtype, check_float};
use crate::base::data::codes::sizes;
use crate::base::data::storage::tensor_of;
use crate::base::error::{Error, Result, shape_error};
use crate::cast::tensor::{Fp8Tensor, Quantized, multiply};
use crate::device::{GemmOutput, backend};
use candle_core::{DType, Tensor};
use fp8_core::{Cast, Contraction, Granularity};

/// The product of two FP8 tensors with their scales multiplied in, as `[a.kept, b.kept]` in the dtype of `out`, outside of
/// candle's graph.
///
/// An operand is a matrix `[product of the leading dims, last dim]`, and beside it stands the dimension to sum over. The same codes
/// serve the product of a linear layer and those of its gradients, if their scales are tensorwise or of square blocks:
///
/// | product | a | b |
/// |---|---|---|
/// | `a b` of `[M, K]` and `[K, N]` | `Contraction::Cols` | `Contraction::Rows` |
/// | `x w^T` of `[M, K]` and `[N, K]` | `Contraction::Cols` | `Contraction::Cols` |
/// | `g w` of `[M, N]` and `[N, K]`, the gradient of x | `Contraction::Cols` | `Contraction::Rows` |
/// | `g^T x` of `[M, N]` and `[M, K]`, the gradient of w | `Contraction::Rows` | `Contraction::Rows` |
///
/// Sums are f32. The result is scaled, rounded to `out.dtype`, and the bias is added, in this order.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fp8_candle::device::GemmOutput;
/// use fp8_candle::{Fp8Tensor, Quantizer, scaled_mm};
/// use fp8_core::{Contraction, Format, Granularity};
///
/// let cast = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise).with_power_of_two(true);
/// let a = Tensor::new(&[[1f32, 2.0], [0.0, -4.0]], &Device::Cpu)?;
/// let b = Tensor::new(&[[0.5f32, 1.0, 8.0], [2.0, 0.0, 1.0]], &Device::Cpu)?;
/// let a8 = Fp8Tensor::quantize(&a, &cast, Contraction::Cols)?;
/// let b8 = Fp8Tensor::quantize(&b, &cast, Contraction::Rows)?;
/// let c = scaled_mm((&a8, Contraction::Cols), (&b8, Contraction::Rows), &GemmOutput::new(DType::F32))?;
/// // Powers of two survive casts whose scales are powers of two.
/// assert_eq!(c.to_vec2::<f32>()?, [[4.5, 1.0, 10.0], [-8.0, 0.0, -4.0]]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
///
/// # Errors
/// If the operands differ in the length of their sums or in their device, or dtype, shape or device of the output or bias do not fit.
pub fn scaled_mm(
    a: (&Fp8Tensor, Contraction),
    b: (&Fp8Tensor, Contraction),
    out: &GemmOutput<'_>,
) -> Result<Tensor> {
    const OP: &str = "scaled_mm";
    check_device(OP, "operand B", b.0.dequant_scale(), a.0.device())?;
    let [(m, terms), (n, got)] = [a, b].map(|(x, contraction)| sizes(&x.grid(), contraction));
    if got != terms {
        let expected = format!("[_, {terms}], the length of operand A's sums");
        let what = "operand B [kept, contracted]";
        return Err(shape_error(OP, what, expected, [n, got]));
    }
    if let Some(bias) = out.bias {
        check_float(OP, "bias", bias)?;
        check_device(OP, "bias", bias, a.0.device())?;
        check_dims(OP, "bias", bias, &[n])?;
    }
    tensor_of(multiply(a, b, out, false)?, (m, n))
}

/// [`scaled_mm`] with an FP8 result: the product in f32 with its bias is multiplied by `quant_scale`, f32 with one element, and cast.
///
/// The amax that comes with the result is that of the product before the scale, so a scale for the next step can be made from it. A
/// scale that is too large for this product saturates it, if `cast` does.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fp8_candle::{Fp8Tensor, Quantizer, scaled_mm_fp8};
/// use fp8_core::{Cast, Contraction, Format, Granularity};
///
/// let cast = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise).with_power_of_two(true);
/// let x = Tensor::new(&[[16f32, 16.0], [0.0, 1.0]], &Device::Cpu)?;
/// let x8 = Fp8Tensor::quantize(&x, &cast, Contraction::Cols)?;
/// // x x^T is [[512, 16], [16, 1]], which does not fit into E4M3 without a scale.
/// let operand = (&x8, Contraction::Cols);
/// for (quant_scale, largest) in [(1f32, 448f32), (0.5, 512.)] {
///     let quant_scale = Tensor::new(&[quant_scale], &Device::Cpu)?;
///     let y8 = scaled_mm_fp8(operand, operand, None, &Cast::new(Format::E4M3), &quant_scale)?;
///     assert_eq!(y8.amax.unwrap().to_vec2::<f32>()?, [[512.]]);
///     let y = y8.tensor.dequantize(candle_core::DType::F32)?;
///     assert_eq!(y.to_vec2::<f32>()?, [[largest, 16.], [16., 1.]]);
/// }
/// # Ok::<(), fp8_candle::Error>(())
/// ```
///
/// # Errors
/// As [`scaled_mm`] and [`Fp8Tensor::quantize_with_scale`].
pub fn scaled_mm_fp8(
    a: (&Fp8Tensor, Contraction),
    b: (&Fp8Tensor, Contraction),
    bias: Option<&Tensor>,
    cast: &Cast,
    quant_scale: &Tensor,
) -> Result<Quantized> {
    let out = GemmOutput {
        bias,
        ..GemmOutput::new(DType::F32)
    };
    let y = scaled_mm(a, b, &out)?;
    Fp8Tensor::quantize_with_scale(&y, cast, quant_scale, Contraction::Cols)
}

impl Fp8Tensor {
    /// Casts `x` (f32, bf16, f16 or f64, any shape) with one `quant_scale` for the whole tensor, and measures its amax in the same
    /// read. `quant_scale` is f32 with one element on the device of `x`; the caller is responsible for its value, which comes from an
    /// earlier amax in delayed scaling.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use fp8_candle::Fp8Tensor;
    /// use fp8_core::{Cast, Contraction, Format};
    ///
    /// let x = Tensor::new(&[3f32, -1000.0], &Device::Cpu)?;
    /// let quant_scale = Tensor::new(&[2f32], &Device::Cpu)?;
    /// let x8 = Fp8Tensor::quantize_with_scale(&x, &Cast::new(Format::E4M3), &quant_scale, Contraction::Cols)?;
    /// assert_eq!(x8.amax.unwrap().to_vec2::<f32>()?, [[1000.0]]); // of x, without the scale
    /// assert_eq!(x8.tensor.dequantize(DType::F32)?.to_vec1::<f32>()?, [3.0, -224.0]); // -2000 saturates at -448
    /// # Ok::<(), fp8_candle::Error>(())
    /// ```
    ///
    /// # Errors
    /// If a dtype or a device does not fit, or `quant_scale` does not have one element. [`Error::Division`] if the cast
    /// [divides](Cast::divides): the quotient by the reciprocal of `quant_scale` is not the product.
    pub fn quantize_with_scale(
        x: &Tensor,
        cast: &Cast,
        quant_scale: &Tensor,
        contraction: Contraction,
    ) -> Result<Quantized> {
        const OP: &str = "Fp8Tensor::quantize_with_scale";
        if cast.divides {
            return Err(Error::Division { op: OP });
        }
        check_float(OP, "the tensor", x)?;
        check_dtype(OP, "quant_scale", quant_scale, DType::F32)?;
        check_device(OP, "quant_scale", quant_scale, x.device())?;
        if quant_scale.elem_count() != 1 {
            return Err(shape_error(
                OP,
                "quant_scale",
                "one element",
                quant_scale.dims(),
            ));
        }
        let backend = backend(x.device())?;
        let quant_scale = quant_scale.detach().contiguous()?.reshape((1, 1))?;
        let dequant_scale = backend.reciprocal(&quant_scale)?;
        let orientation = backend.orientation(contraction, false);
        let values = x.detach().contiguous()?;
        let (codes, amax) = backend.quantize_with_amax(&values, &quant_scale, cast, orientation)?;
        let scheme = (Granularity::Tensorwise, contraction);
        Ok(Quantized {
            tensor: Self::from_codes(codes, x.dims(), cast.format, scheme, dequant_scale)?,
            quant_scale,
            amax: Some(amax.reshape((1, 1))?),
            cast: *cast,
        })
    }
}
