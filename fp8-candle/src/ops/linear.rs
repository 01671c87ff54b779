//! Linear layers in high precision whose rows do not depend on each other.

use crate::base::check::{check_device, check_dims, check_float, last_dim};
use crate::base::data::matrix_dims;
use crate::base::error::{Result, shape_error};
use crate::base::profile::{Kind, enter};
use crate::device::backend;
use crate::graph::{Ready, attach};
use candle_core::Tensor;

const OP: &str = "linear";

/// `x weight^T + bias`, differentiable. On the CPU each row of the result has the same bits whatever the number of rows beside it,
/// which candle's matmul does not promise: what a model computes token by token equals what it computes for the whole text.
///
/// The weight is read in its own dtype. Sums are in f32 (f64 for an `x` of f64) and rounded to x's dtype, in which the bias is added.
/// The last bits depend on the instruction set, but not on the number of threads. Gradients are those of candle's matmul. On other
/// devices it is candle's matmul, with the weight cast to x's dtype.
///
/// # Shapes
/// `x` `[.., in]`, `weight` `[out, in]`, `bias` `[out]`, each in f32, bf16, f16 or f64; result `[.., out]` in x's dtype.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fp8_candle::ops::linear;
///
/// let x = Tensor::new(&[[1f32, 2.0], [0.5, -1.0]], &Device::Cpu)?;
/// let weight = Tensor::new(&[[1f32, 0.5], [0.0, 4.0]], &Device::Cpu)?.to_dtype(DType::BF16)?;
/// let y = linear(&x, &weight, None)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[2.0, 8.0], [0.0, -4.0]]);
/// let alone = linear(&x.narrow(0, 1, 1)?, &weight, None)?;
/// assert_eq!(alone.to_vec2::<f32>()?, y.narrow(0, 1, 1)?.to_vec2::<f32>()?);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    check_float(OP, "x", x)?;
    check_float(OP, "weight", weight)?;
    check_device(OP, "weight", weight, x.device())?;
    let inputs = last_dim(OP, "x", x)?;
    let outputs = match *weight.dims() {
        [outputs, width] if width == inputs => outputs,
        _ => {
            let expected = format!("[out, {inputs}], as x");
            return Err(shape_error(OP, "weight", expected, weight.dims()));
        }
    };
    if let Some(bias) = bias {
        check_float(OP, "bias", bias)?;
        check_device(OP, "bias", bias, x.device())?;
        check_dims(OP, "bias", bias, &[outputs])?;
    }
    let shape = [&x.dims()[..x.rank() - 1], &[outputs]].concat();
    // Not from the number of elements, which is 0 if there are no inputs.
    let (rows, _) = matrix_dims(x.dims());
    if !x.device().is_cpu() {
        let weight = weight.to_dtype(x.dtype())?;
        let y = x.reshape((rows, inputs))?.matmul(&weight.t()?)?;
        let y = y.reshape(shape)?;
        return Ok(match bias {
            Some(bias) => y.broadcast_add(&bias.to_dtype(y.dtype())?)?,
            None => y,
        });
    }
    crate::base::simd::check()?;
    let _scope = enter(Kind::Gemm);
    let result = crate::device::cpu::linear::linear(x, weight, bias, (rows, outputs, inputs))?;
    let result = Ready::new(result, shape)?;
    match bias {
        None => attach(OP, [x, weight], result, |[x, weight], _, grad| {
            let (x, weight) = of_matrices(x, weight, grad)?;
            Ok([x, weight])
        }),
        Some(bias) => attach(
            OP,
            [x, weight, bias],
            result,
            |[x, weight, bias], _, grad| {
                let outputs = bias.dim(0)?;
                let sums = bias.track_op().then(|| {
                    let grad = grad.contiguous()?.reshape(((), outputs))?;
                    backend(grad.device())?.sum_rows(&grad, bias.dtype())
                });
                let (x, weight) = of_matrices(x, weight, grad)?;
                Ok([x, weight, sums.transpose()?])
            },
        ),
    }
}

/// The gradients of `x` and `weight` that are asked for, by candle's matmul.
fn of_matrices(
    x: &Tensor,
    weight: &Tensor,
    grad: &Tensor,
) -> Result<(Option<Tensor>, Option<Tensor>)> {
    let (outputs, inputs) = weight.dims2()?;
    let (rows, _) = matrix_dims(x.dims());
    let grad = grad.contiguous()?.reshape((rows, outputs))?;
    let of_x = x.track_op().then(|| -> Result<Tensor> {
        let weight = weight.detach().to_dtype(grad.dtype())?;
        Ok(grad.matmul(&weight)?.reshape(x.dims())?)
    });
    let of_weight = weight.track_op().then(|| -> Result<Tensor> {
        let x = x.detach().contiguous()?.reshape((rows, inputs))?;
        let product = backend(grad.device())?.transposed_product(&grad, &x)?;
        Ok(product.to_dtype(weight.dtype())?)
    });
    Ok((of_x.transpose()?, of_weight.transpose()?))
}
