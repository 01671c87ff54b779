//! The loss of a language model's output layer, without all logits at once.

use super::cross_entropy::{CrossEntropyOptions, check_targets};
use super::linear::{Products, check};
use super::{detached, wide_dtype};
use crate::base::data::storage::take_storage;
use crate::base::error::{Result, internal};
use crate::graph::{Ready, attach};
use candle_core::{DType, Tensor};

const OP: &str = "linear_cross_entropy";

/// Logits that are in memory at once, in bytes, unless the gradient of the weight takes more anyway.
const LOGITS: usize = 64 << 20;

/// Settings of [`linear_cross_entropy`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinearCrossEntropyOptions {
    /// As [`LinearOptions::operands`](super::LinearOptions::operands).
    pub operands: Option<DType>,
    /// As [`CrossEntropyOptions::ignore_index`]. With it the targets of each call are copied from their device to the host, which counts
    /// those that are left.
    pub ignore_index: Option<i64>,
}

impl LinearCrossEntropyOptions {
    /// The same options with another [`LinearCrossEntropyOptions::operands`].
    pub fn with_operands(self, operands: impl Into<Option<DType>>) -> Self {
        Self {
            operands: operands.into(),
            ..self
        }
    }

    /// The same options with another [`LinearCrossEntropyOptions::ignore_index`].
    pub fn with_ignore_index(self, ignore_index: impl Into<Option<i64>>) -> Self {
        Self {
            ignore_index: ignore_index.into(),
            ..self
        }
    }
}

/// The [cross entropy](super::cross_entropy()) of the logits `x weight^T` against integer targets, differentiable.
///
/// Logits exist for a part of the rows at a time: 64 MiB of them or, where the weight gets a gradient, as much as it takes. If `x` or
/// `weight` is part of a graph, their gradients are computed with the loss, and kept for the backward pass: each logit is computed
/// once. For a loss without a backward pass, as in validation, pass detached tensors.
///
/// Logits are those of [`linear_with`](super::linear_with), so the loss is that of all logits at once. Their gradients, and the sums of the
/// weight's, are in f32 (f64 for an `x` of f64).
///
/// # Shapes
/// `x` `[.., in]` and `weight` `[classes, in]` in f32, bf16, f16 or f64; `targets` `[..]` of any integer dtype. The loss is a scalar,
/// f64 for an `x` of f64 and f32 otherwise, and NaN if there are no positions.
///
/// # Errors
/// As [`linear_with`](super::linear_with) and [`cross_entropy`](super::cross_entropy()).
///
/// # Source
/// Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", section 3.2, 2024.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use fp8_candle::ops::{LinearCrossEntropyOptions, cross_entropy, linear, linear_cross_entropy};
///
/// let x = Var::new(&[[1f32, 2.], [0.5, -1.]], &Device::Cpu)?;
/// let weight = Var::new(&[[1f32, 0.5], [0., 4.], [1., 1.]], &Device::Cpu)?;
/// let targets = Tensor::new(&[1u32, 0], &Device::Cpu)?;
/// let loss = linear_cross_entropy(&x, &weight, &targets, LinearCrossEntropyOptions::default())?;
/// let logits = linear(&x, &weight, None)?;
/// let expected = cross_entropy(&logits, &targets)?;
/// assert_eq!(loss.to_scalar::<f32>()?, expected.to_scalar::<f32>()?);
/// assert!(loss.backward()?.get(&weight).is_some());
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn linear_cross_entropy(
    x: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    options: LinearCrossEntropyOptions,
) -> Result<Tensor> {
    let (rows, inputs, classes) = check(OP, x, weight)?;
    let products = Products::new(OP, options.operands, x.dtype())?;
    check_targets(OP, targets, x)?;
    let dtype = wide_dtype(x.dtype());
    let of_weight = match weight.track_op() {
        true => weight.elem_count() * dtype.size_in_bytes(),
        false => 0,
    };
    let call = Call {
        products,
        dtype,
        weight: products.operand(weight)?,
        options: CrossEntropyOptions::default().with_ignore_index(options.ignore_index),
        wanted: [x.track_op(), weight.track_op()],
        rows_at_once: LOGITS.max(of_weight) / (classes * dtype.size_in_bytes()).max(1),
    };
    let matrix = x.detach().reshape((rows, inputs))?;
    let (loss, gradients) = call.compute(&matrix, &targets.flatten_all()?)?;
    let loss = Ready::new(take_storage(loss)?, ())?;
    attach(OP, [x, weight], loss, move |[x, weight], _, grad| {
        let [of_x, of_weight] = &gradients;
        Ok([
            multiplied(of_x, grad, x)?,
            multiplied(of_weight, grad, weight)?,
        ])
    })
}

/// `gradient` times the scalar `grad`, in the shape and dtype of `of`.
fn multiplied(gradient: &Option<Tensor>, grad: &Tensor, of: &Tensor) -> Result<Option<Tensor>> {
    let Some(gradient) = gradient else {
        return Ok(None);
    };
    let grad = grad.to_dtype(gradient.dtype())?;
    let is_one = grad.device().is_cpu() && grad.to_dtype(DType::F64)?.to_scalar::<f64>()? == 1.;
    let product = match is_one {
        true => gradient.clone(),
        false => gradient.broadcast_mul(&grad)?,
    };
    Ok(Some(product.reshape(of.dims())?.to_dtype(of.dtype())?))
}

/// One call.
struct Call {
    products: Products,
    /// Of the logits' gradients.
    dtype: DType,
    /// As an operand.
    weight: Tensor,
    options: CrossEntropyOptions,
    /// The gradients of x and of the weight.
    wanted: [bool; 2],
    rows_at_once: usize,
}

impl Call {
    /// The loss, and the gradients of x and of the weight in the dtype of the logits' gradients. `x`: `[rows, in]`; `targets`: `[rows]`.
    fn compute(&self, x: &Tensor, targets: &Tensor) -> Result<(Tensor, [Option<Tensor>; 2])> {
        let rows = targets.elem_count();
        let parts = rows.div_ceil(self.rows_at_once.max(1)).max(1);
        let counts = (0..parts)
            // Parts of nearly equal sizes: a small last one would be slow.
            .map(|part| part * rows / parts..(part + 1) * rows / parts)
            .map(|part| {
                Ok((
                    part.clone(),
                    self.counted(&targets.narrow(0, part.start, part.len())?)?,
                ))
            })
            .collect::<Result<Vec<_>>>()?;
        let total: usize = counts.iter().map(|(_, count)| count).sum();
        let mut sums = Sums::default();
        for (part, count) in counts {
            // The mean of no positions is NaN.
            if count == 0 && total > 0 {
                if self.wanted[0] {
                    let shape = (part.len(), x.dim(1)?);
                    sums.of_x
                        .push(Tensor::zeros(shape, self.dtype, x.device())?);
                }
                continue;
            }
            let x = x.narrow(0, part.start, part.len())?;
            let targets = targets.narrow(0, part.start, part.len())?;
            let share = if total > 0 {
                count as f64 / total as f64
            } else {
                1.
            };
            self.add(&x, &targets, share, &mut sums)?;
        }
        sums.finish()
    }

    /// How many targets are not ignored.
    fn counted(&self, targets: &Tensor) -> Result<usize> {
        let Some(ignored) = self.options.ignore_index else {
            return Ok(targets.elem_count());
        };
        let targets = targets.to_dtype(DType::I64)?.to_vec1::<i64>()?;
        Ok(targets.iter().filter(|&&target| target != ignored).count())
    }

    /// Adds a part of the rows, which has this share of the targets.
    fn add(&self, x: &Tensor, targets: &Tensor, share: f64, sums: &mut Sums) -> Result<()> {
        let of = x.dtype();
        let x = self.products.operand(x)?;
        // In one expression, so that those in 16 bits do not stay.
        let logits = (self.products.forward(&x, &self.weight, None, of)?).to_dtype(self.dtype)?;
        let (mean, gradient) = detached::cross_entropy(&logits, 1., targets, self.options)?;
        sums.add_loss((mean * share)?)?;
        if self.wanted == [false; 2] {
            return Ok(());
        }
        let grad = gradient(share)?;
        // Before the products make room for their results.
        drop((gradient, logits));
        let grad = self.products.operand(&grad)?;
        if self.wanted[0] {
            sums.of_x
                .push(self.products.grad_input(&grad, &self.weight, self.dtype)?);
        }
        if self.wanted[1] {
            sums.add_weight(match self.products {
                // Contiguous, for the sum.
                Products::AsTheyAre => grad.t()?.matmul(&x.to_dtype(self.dtype)?)?,
                Products::InBf16 => self.products.grad_weight(&grad, &x, self.dtype)?,
            })?;
        }
        Ok(())
    }
}

/// What parts add up to.
#[derive(Default)]
struct Sums {
    loss: Option<Tensor>,
    of_x: Vec<Tensor>,
    of_weight: Option<Tensor>,
}

impl Sums {
    fn add_loss(&mut self, loss: Tensor) -> Result<()> {
        self.loss = Some(match self.loss.take() {
            Some(sum) => (sum + loss)?,
            None => loss,
        });
        Ok(())
    }

    fn add_weight(&mut self, gradient: Tensor) -> Result<()> {
        self.of_weight = Some(match self.of_weight.take() {
            Some(sum) => (sum + gradient)?,
            None => gradient,
        });
        Ok(())
    }

    /// The loss, and the gradients of x and of the weight.
    fn finish(self) -> Result<(Tensor, [Option<Tensor>; 2])> {
        let of_x = match self.of_x.as_slice() {
            [] => None,
            [all] => Some(all.clone()),
            parts => Some(Tensor::cat(parts, 0)?),
        };
        match self.loss {
            Some(loss) => Ok((loss, [of_x, self.of_weight])),
            None => internal!("a loss without parts"),
        }
    }
}

#[cfg(test)]
mod tests;
