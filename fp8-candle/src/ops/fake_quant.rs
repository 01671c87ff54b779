//! Quantizing and dequantizing as a differentiable op, in the forward or the backward direction.

use crate::base::data::storage::{owned_storage, take_storage};
use crate::base::error::Result;
use crate::cast::quantizer::Quantizer;
use crate::graph::{Ready, attach};
use candle_core::Tensor;
use fp8_core::Contraction;

/// `dequantize(quantize(x))` in x's dtype; the gradient passes straight through.
///
/// # Errors
/// If `x` is not f32, bf16, f16 or f64, or the quantizer's static scale is missing.
///
/// # Examples
/// ```
/// use candle_core::{Device, Var};
/// use fp8_candle::{Quantizer, fake_quantize};
/// use fp8_core::{Contraction, Format, Granularity};
///
/// let x = Var::new(&[448f32, 17.0], &Device::Cpu)?; // amax 448, so the scale is 1
/// let quantizer = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise);
/// let y = fake_quantize(&x, &quantizer, Contraction::Cols)?;
/// assert_eq!(y.to_vec1::<f32>()?, [448.0, 16.0]); // a tie between 16 and 18
/// let grads = y.sum_all()?.backward()?;
/// assert_eq!(grads.get(&x).unwrap().to_vec1::<f32>()?, [1.0, 1.0]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn fake_quantize(
    x: &Tensor,
    quantizer: &Quantizer,
    contraction: Contraction,
) -> Result<Tensor> {
    cast_values_and_gradient(x, Some((quantizer, contraction)), None)
}

/// The identity; the gradient is quantized and dequantized, in its own dtype, in the backward pass.
///
/// # Errors
/// In `backward`, as [`fake_quantize`].
pub fn grad_cast(x: &Tensor, quantizer: &Quantizer, contraction: Contraction) -> Result<Tensor> {
    cast_values_and_gradient(x, None, Some((quantizer, contraction)))
}

/// [`fake_quantize`] with `forward` and [`grad_cast`] with `backward`, in one node; `None` leaves that direction unchanged.
pub fn cast_values_and_gradient(
    x: &Tensor,
    forward: Option<(&Quantizer, Contraction)>,
    backward: Option<(&Quantizer, Contraction)>,
) -> Result<Tensor> {
    let storage = match forward {
        None => owned_storage(x)?,
        Some((quantizer, contraction)) => {
            let cast = quantizer.quantize(x, contraction)?.tensor;
            take_storage(cast.dequantize(x.dtype())?)?
        }
    };
    let backward = backward.map(|(quantizer, contraction)| (quantizer.clone(), contraction));
    let result = Ready::new(storage, x.shape())?;
    attach("fp8_cast", [x], result, move |_, _, grad| match &backward {
        None => Ok([Some(grad.clone())]),
        Some((quantizer, contraction)) => {
            let cast = quantizer.quantize(grad, *contraction)?.tensor;
            Ok([Some(cast.dequantize(grad.dtype())?)])
        }
    })
}
