//! Linear layers in high precision whose rows do not depend on each other.

mod products;

use crate::base::check::{check_device, check_dims, check_float, last_dim};
use crate::base::data::matrix_dims;
use crate::base::data::storage::take_storage;
use crate::base::error::{Result, shape_error};
use crate::cast::weight_version::Seen;
use crate::device::backend;
use crate::graph::{Ready, attach};
use candle_core::{DType, Tensor};
pub(crate) use products::Products;

const OP: &str = "linear";

/// Settings of [`linear_with`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinearOptions {
    /// The dtype to which `x`, the weight and, in the backward pass, the gradient are rounded before each product: bf16, which is
    /// faster where the processor [multiplies bf16](multiplies_bf16). `None` for tensors as they are, the default.
    pub operands: Option<DType>,
}

impl LinearOptions {
    /// The same options with another [`LinearOptions::operands`].
    pub fn with_operands(self, operands: impl Into<Option<DType>>) -> Self {
        Self {
            operands: operands.into(),
        }
    }
}

/// Whether this processor has instructions that multiply bf16, so that products of operands in bf16 take less time than those in f32.
pub fn multiplies_bf16() -> bool {
    crate::device::cpu::multiplies_bf16()
}

/// [`linear_with`] of tensors as they are.
///
/// # Errors
/// As [`linear_with`].
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
    linear_with(x, weight, bias, LinearOptions::default())
}

/// `x weight^T + bias`, differentiable. On the CPU each row of the result has the same bits whatever the number of rows beside it,
/// which candle's matmul does not promise: what a model computes token by token equals what it computes for the whole text.
///
/// The weight is read in its own dtype. Sums are in f32 (f64 for an `x` of f64) and rounded to x's dtype, in which the bias is added.
/// The last bits depend on the instruction set, but not on the number of threads. Gradients are those of candle's matmul, or of operands
/// rounded by the options. On other devices products are candle's matmul, with the weight cast to x's dtype or both to the options'.
///
/// The gradient of `x` reads the weight again. On the CPU, and elsewhere with bf16 operands, the backward pass fails with
/// [`Error::ChangedValues`](crate::Error::ChangedValues) if it has changed since (on other devices: if the change was
/// [announced](crate::weight_version)).
///
/// # Shapes
/// `x` `[.., in]`, `weight` `[out, in]`, `bias` `[out]`, each in f32, bf16, f16 or f64; result `[.., out]` in x's dtype.
///
/// # Errors
/// If shapes, dtypes or devices do not fit, or the options have another dtype than bf16.
pub fn linear_with(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: LinearOptions,
) -> Result<Tensor> {
    let (rows, inputs, outputs) = check(OP, x, weight)?;
    let products = Products::new(OP, options.operands, x.dtype())?;
    if let Some(bias) = bias {
        check_float(OP, "bias", bias)?;
        check_device(OP, "bias", bias, x.device())?;
        check_dims(OP, "bias", bias, &[outputs])?;
    }
    let shape = [&x.dims()[..x.rank() - 1], &[outputs]].concat();
    if !x.device().is_cpu() && products == Products::AsTheyAre {
        // All of them have gradients.
        let weight = weight.to_dtype(x.dtype())?;
        let y = x.reshape((rows, inputs))?.matmul(&weight.t()?)?;
        let y = y.reshape(shape)?;
        return Ok(match bias {
            Some(bias) => y.broadcast_add(&bias.to_dtype(y.dtype())?)?,
            None => y,
        });
    }
    let seen = x.track_op().then(|| Seen::of(weight)).transpose()?;
    let matrix = x.detach().reshape((rows, inputs))?;
    let y = products.forward(&matrix, &weight.detach(), bias, x.dtype())?;
    let result = Ready::new(take_storage(y)?, shape)?;
    match bias {
        None => attach(OP, [x, weight], result, move |[x, weight], _, grad| {
            of_matrices(products, x, (weight, seen.as_ref()), grad)
        }),
        Some(bias) => attach(
            OP,
            [x, weight, bias],
            result,
            move |[x, weight, bias], _, grad| {
                let sums = bias
                    .track_op()
                    .then(|| of_bias(&grad.contiguous()?.reshape((rows, outputs))?, bias));
                let [x, weight] = of_matrices(products, x, (weight, seen.as_ref()), grad)?;
                Ok([x, weight, sums.transpose()?])
            },
        ),
    }
}

/// Rows of x, its features and those of the result, if `x` `[.., in]` and `weight` `[out, in]` fit each other.
pub(crate) fn check(
    op: &'static str,
    x: &Tensor,
    weight: &Tensor,
) -> Result<(usize, usize, usize)> {
    check_float(op, "x", x)?;
    check_float(op, "weight", weight)?;
    check_device(op, "weight", weight, x.device())?;
    let inputs = last_dim(op, "x", x)?;
    // Not from the number of elements, which is 0 if there are no inputs.
    let (rows, _) = matrix_dims(x.dims());
    match *weight.dims() {
        [outputs, width] if width == inputs => Ok((rows, inputs, outputs)),
        _ => {
            let expected = format!("[out, {inputs}], as x");
            Err(shape_error(op, "weight", expected, weight.dims()))
        }
    }
}

/// The gradient of `bias`, from that of the result.
fn of_bias(grad: &Tensor, bias: &Tensor) -> Result<Tensor> {
    match grad.dtype() {
        // Backends sum in f32.
        DType::F64 => Ok(grad.sum(0)?.to_dtype(bias.dtype())?),
        _ => backend(grad.device())?.sum_rows(grad, bias.dtype()),
    }
}

/// The gradients of `x` and `weight` that are asked for; fails if that of `x` would be of another weight than was `seen`.
fn of_matrices(
    products: Products,
    x: &Tensor,
    (weight, seen): (&Tensor, Option<&Seen>),
    grad: &Tensor,
) -> Result<[Option<Tensor>; 2]> {
    let (outputs, inputs) = weight.dims2()?;
    let (rows, _) = matrix_dims(x.dims());
    let grad = products.operand(&grad.contiguous()?.reshape((rows, outputs))?)?;
    let of_x = x.track_op().then(|| -> Result<Tensor> {
        let product = products.grad_input(&grad, &weight.detach(), x.dtype())?;
        if let Some(seen) = seen {
            seen.check(weight, OP, "weight")?;
        }
        Ok(product.reshape(x.dims())?)
    });
    let of_weight = weight.track_op().then(|| {
        let x = x.detach().contiguous()?.reshape((rows, inputs))?;
        products.grad_weight(&grad, &x, weight.dtype())
    });
    Ok([of_x.transpose()?, of_weight.transpose()?])
}
