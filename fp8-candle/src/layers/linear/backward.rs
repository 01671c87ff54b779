//! The backward pass: which operands each product has, which cast serves more than one of them, and the products.
//!
//! [`gradients`] decides for linear layers and convolutions alike; [`BackwardProducts`] is what the two do differently.

use super::fetch::{codes_again, values_again};
use super::held::HeldWeight;
use super::plan::{GemmPlan, LinearPlan, SavedCasts, kernel_gradient, kernel_matrix};
use crate::base::data::matrix_dims;
use crate::base::error::{Result, internal};
use crate::cast::quantizer::{Quantizer, recast};
use crate::cast::tensor::{Fp8Tensor, multiply};
use crate::device::{GemmOutput, backend};
use crate::graph::Ready;
use crate::graph::wide::value::Value;
use candle_core::{DType, Tensor};
use fp8_core::Contraction::{self, Cols, Rows};
use std::cell::OnceCell;

/// The operands of a backward product.
pub(crate) enum Operands<C> {
    /// No plan: both in high precision.
    HighPrecision,
    /// grad_output in high precision, the other one cast: the values are multiplied in f32.
    OneCast(C),
    /// Both cast.
    Cast {
        grad_output: C,
        other: C,
        use_fast_accum: bool,
    },
}

/// The casts and products of a layer in its backward pass.
pub(crate) trait BackwardProducts {
    /// A tensor that was cast.
    type Cast: Clone;

    /// Whether the weight has no state for casts, so that grad_input is a product in high precision.
    fn is_frozen(&self) -> bool {
        false
    }

    /// The input, for grad_weight.
    fn cast_input(&self, quantizer: &Quantizer) -> Result<Self::Cast>;

    /// The weight, for grad_input.
    fn cast_weight(&self, quantizer: &Quantizer) -> Result<Self::Cast>;

    /// grad_output for a product that sums over `contraction` as in a linear layer; with `both`, for the other one as well.
    fn cast_grad_output(
        &self,
        quantizer: &Quantizer,
        contraction: Contraction,
        both: bool,
    ) -> Result<Self::Cast>;

    /// The sums of grad_output or, with `cast`, of the values of its cast, which is returned too, for the products.
    fn grad_bias(&self, cast: Option<&Quantizer>) -> Result<(Tensor, Option<Self::Cast>)>;

    /// The sums of grad_output, and its cast, in one pass where a device has that; the cast sums over the columns, with `both` over the
    /// rows too.
    fn grad_bias_beside_cast(
        &self,
        _quantizer: &Quantizer,
        _both: bool,
    ) -> Result<Option<(Tensor, Self::Cast)>> {
        Ok(None)
    }

    /// In the dtype of the input.
    fn grad_input(&self, operands: Operands<Self::Cast>) -> Result<Tensor>;

    /// In the dtype of the weight.
    fn grad_weight(&self, operands: Operands<Self::Cast>) -> Result<Tensor>;
}

/// The gradients of input, weight and bias that are `wanted`.
pub(crate) fn gradients<L: BackwardProducts>(
    layer: &L,
    plan: &LinearPlan,
    saved: &SavedCasts<L::Cast>,
    [input_wanted, weight_wanted, bias_wanted]: [bool; 3],
) -> Result<[Option<Tensor>; 3]> {
    let gemms = [&plan.output, &plan.grad_input, &plan.grad_weight];
    for gemm in gemms.into_iter().flatten() {
        if let Some(recorder) = &gemm.a.observers.recorder {
            recorder.step.note_backward();
        }
    }
    // Kept for the second product if one copy serves both.
    let mut go8 = None;
    let mut gradients = [None, None, None];
    let for_input = plan.grad_input.as_ref().filter(|_| !layer.is_frozen());
    let both = for_input.is_some_and(|gemm| {
        let again = |second: &GemmPlan| gemm.a.serves(&second.a);
        weight_wanted && plan.grad_weight.as_ref().is_some_and(again)
    });
    if bias_wanted {
        let beside = match (plan.cast_for_bias(), for_input) {
            (None, Some(gemm)) if input_wanted && !plan.grad_output_in_high_precision => {
                layer.grad_bias_beside_cast(&gemm.a, both)?
            }
            _ => None,
        };
        let (grad, cast) = match beside {
            Some((grad, cast)) => (grad, Some(cast)),
            None => layer.grad_bias(plan.cast_for_bias())?,
        };
        gradients[2] = Some(grad);
        go8 = cast;
    }
    if input_wanted {
        let operands = match for_input {
            None => Operands::HighPrecision,
            Some(gemm) => {
                let other = match &saved.weight {
                    Some(saved) => saved.clone(),
                    None => layer.cast_weight(&gemm.b)?,
                };
                if plan.grad_output_in_high_precision {
                    Operands::OneCast(other)
                } else {
                    let grad_output = match go8.take() {
                        Some(cast) => cast,
                        None => layer.cast_grad_output(&gemm.a, Cols, both)?,
                    };
                    go8 = both.then(|| grad_output.clone());
                    Operands::Cast {
                        grad_output,
                        other,
                        use_fast_accum: gemm.use_fast_accum,
                    }
                }
            }
        };
        let grad = layer.grad_input(operands)?;
        gradients[0] = Some(recast(grad, plan.results.grad_input.as_ref())?);
    }
    if weight_wanted {
        let operands = match &plan.grad_weight {
            None => Operands::HighPrecision,
            Some(gemm) => {
                let other = match &saved.input {
                    Some(saved) => saved.clone(),
                    None => layer.cast_input(&gemm.b)?,
                };
                match plan.grad_output_in_high_precision {
                    true => Operands::OneCast(other),
                    false => Operands::Cast {
                        grad_output: match go8 {
                            Some(cast) => cast,
                            None => layer.cast_grad_output(&gemm.a, Rows, false)?,
                        },
                        other,
                        use_fast_accum: gemm.use_fast_accum,
                    },
                }
            }
        };
        let grad = layer.grad_weight(operands)?;
        gradients[1] = Some(recast(grad, plan.results.grad_weight.as_ref())?);
    }
    Ok(gradients)
}

/// The backward pass of one call of a linear layer.
pub(crate) struct LinearBackward<'a> {
    pub(crate) plan: &'a LinearPlan,
    pub(crate) saved: &'a SavedCasts<Fp8Tensor>,
    /// x in high precision, `[.., K]`, computed where it is needed.
    pub(crate) input: &'a dyn Fn() -> Result<Tensor>,
    /// dtype of x.
    pub(crate) dtype: DType,
    pub(crate) weight: &'a HeldWeight,
    pub(crate) bias: Option<DType>,
    /// `[.., N]`
    pub(crate) grad_output: &'a Value,
    /// The same as `[M, N]`, once it was asked for.
    pub(crate) matrix: OnceCell<Tensor>,
}

impl LinearBackward<'_> {
    /// The gradients of x `[M, K]`, weight and bias that are `wanted`.
    pub(crate) fn gradients(&self, wanted: [bool; 3]) -> Result<[Option<Tensor>; 3]> {
        let [input, weight, bias] = gradients(self, self.plan, self.saved, wanted)?;
        let weight = match (weight, self.weight) {
            (Some(gradient), HeldWeight::Kernel(kernel, _)) => {
                Some(kernel_gradient(&gradient, kernel)?)
            }
            (Some(whole), HeldWeight::Fetched(source)) => Some(source.gradient(whole)?),
            (weight, _) => weight,
        };
        Ok([input, weight, bias])
    }

    /// The weight in high precision, `[N, K]`.
    fn weight_matrix(&self) -> Result<Tensor> {
        match self.weight {
            HeldWeight::HighPrecision(weight) => Ok(weight.clone()),
            HeldWeight::Kernel(kernel, in_features) => kernel_matrix(kernel, &[], *in_features),
            _ => internal!("fp8_linear `{}`: no weight to cast", self.plan.path),
        }
    }

    /// Checks that the weight is still the one of the forward pass.
    fn check_weight(&self) -> Result<()> {
        match self.weight.held() {
            Some(held) => self.saved.check(held, &self.plan.path),
            None => Ok(()),
        }
    }

    /// grad_output `[M, N]`.
    fn grad_matrix(&self) -> Result<&Tensor> {
        if let Some(matrix) = self.matrix.get() {
            return Ok(matrix);
        }
        let value = self.grad_output;
        let matrix = value
            .get()?
            .contiguous()?
            .reshape(matrix_dims(value.dims()))?;
        Ok(self.matrix.get_or_init(|| matrix))
    }

    /// x `[M, K]`.
    fn input_matrix(&self) -> Result<Tensor> {
        let x = (self.input)()?;
        let k = x.dims().last().copied().unwrap_or(0);
        let (m, _) = matrix_dims(self.grad_output.dims());
        Ok(x.contiguous()?.reshape((m, k))?)
    }

    /// The result of a backward GEMM, detached.
    fn product(
        &self,
        a: (&Fp8Tensor, Contraction),
        b: (&Fp8Tensor, Contraction),
        dtype: DType,
        use_fast_accum: bool,
    ) -> Result<Tensor> {
        let shape = (a.0.operand(a.1).kept(), b.0.operand(b.1).kept());
        let out = GemmOutput {
            dtype,
            bias: None,
            use_fast_accum,
        };
        let storage = multiply(a, b, &out, self.plan.emulate)?;
        Ready::new(storage, shape)?.into_tensor()
    }
}

impl BackwardProducts for LinearBackward<'_> {
    type Cast = Fp8Tensor;

    fn is_frozen(&self) -> bool {
        matches!(self.weight, HeldWeight::Codes(_) | HeldWeight::Packed(_))
    }

    fn cast_input(&self, quantizer: &Quantizer) -> Result<Fp8Tensor> {
        Ok(quantizer.quantize(&self.input_matrix()?, Rows)?.tensor)
    }

    fn cast_weight(&self, quantizer: &Quantizer) -> Result<Fp8Tensor> {
        if let HeldWeight::Fetched(source) = self.weight {
            return codes_again(&**source, quantizer, self.plan, self.saved);
        }
        let codes = quantizer.quantize(&self.weight_matrix()?, Rows)?.tensor;
        self.check_weight()?;
        Ok(codes)
    }

    fn cast_grad_output(
        &self,
        quantizer: &Quantizer,
        contraction: Contraction,
        both: bool,
    ) -> Result<Fp8Tensor> {
        if let (Cols, Some(cast)) = (contraction, self.grad_output.cast(quantizer, both)?) {
            return Ok(cast.tensor);
        }
        let cast = quantizer.quantize_for(self.grad_matrix()?, contraction, both)?;
        Ok(cast.tensor)
    }

    fn grad_bias(&self, cast: Option<&Quantizer>) -> Result<(Tensor, Option<Fp8Tensor>)> {
        let dtype = self.bias.unwrap_or(self.grad_output.dtype());
        let go = self.grad_matrix()?;
        let sum = |x: &Tensor| backend(x.device())?.sum_rows(x, dtype);
        match cast {
            None => Ok((sum(go)?, None)),
            Some(cast) => {
                let cast = cast.quantize_for(go, Cols, true)?.tensor;
                Ok((sum(&cast.dequantize(DType::F32)?)?, Some(cast)))
            }
        }
    }

    fn grad_bias_beside_cast(
        &self,
        quantizer: &Quantizer,
        both: bool,
    ) -> Result<Option<(Tensor, Fp8Tensor)>> {
        let value = self.grad_output;
        let dtype = self.bias.unwrap_or(value.dtype());
        let done = value.cast_and_sum(quantizer, both, dtype)?;
        Ok(done.map(|(cast, sums)| (sums, cast.tensor)))
    }

    /// `grad_output weight`, `[M, K]`.
    fn grad_input(&self, operands: Operands<Fp8Tensor>) -> Result<Tensor> {
        let dtype = self.dtype;
        match operands {
            Operands::HighPrecision => {
                let go = self.grad_matrix()?;
                // A frozen FP8 weight has no state for gradients, so they are computed from its dequantized value.
                let values = match self.weight {
                    HeldWeight::HighPrecision(_) | HeldWeight::Kernel(..) => {
                        self.weight_matrix()?.to_dtype(go.dtype())?
                    }
                    HeldWeight::Codes(w8) => w8.dequantize(go.dtype())?,
                    HeldWeight::Packed(w8) => w8.dequantize(go.dtype())?,
                    HeldWeight::Fetched(source) => {
                        values_again(&**source, self.plan, self.saved)?.to_dtype(go.dtype())?
                    }
                };
                let grad = go.matmul(&values)?;
                self.check_weight()?;
                Ok(grad)
            }
            Operands::OneCast(weight) => {
                let go = self.grad_matrix()?.to_dtype(DType::F32)?;
                let weight = weight.dequantize(DType::F32)?;
                Ok(go.matmul(&weight)?.to_dtype(dtype)?)
            }
            Operands::Cast {
                grad_output,
                other,
                use_fast_accum,
            } => self.product((&grad_output, Cols), (&other, Rows), dtype, use_fast_accum),
        }
    }

    /// `grad_output^T x`, `[N, K]`.
    fn grad_weight(&self, operands: Operands<Fp8Tensor>) -> Result<Tensor> {
        let dtype = match self.weight {
            HeldWeight::Fetched(source) => source.dtype(),
            _ => self.weight_matrix()?.dtype(),
        };
        match operands {
            Operands::HighPrecision => {
                let go = self.grad_matrix()?;
                let product =
                    backend(go.device())?.transposed_product(go, &self.input_matrix()?)?;
                Ok(product.to_dtype(dtype)?)
            }
            Operands::OneCast(x) => {
                let go = self.grad_matrix()?.to_dtype(DType::F32)?;
                let x = x.dequantize(DType::F32)?;
                Ok(go.t()?.matmul(&x)?.to_dtype(dtype)?)
            }
            Operands::Cast {
                grad_output,
                other,
                use_fast_accum,
            } => self.product((&grad_output, Rows), (&other, Rows), dtype, use_fast_accum),
        }
    }
}
