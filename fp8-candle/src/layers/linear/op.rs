//! The autograd node of the FP8 linear layer.

use super::backward::{self, Layer, Operands, Wanted, Which, gradients};
use super::plan::{LinearPlan, LinearWeight};
use super::product::multiply;
use crate::base::data::matrix_dims;
use crate::base::error::{Result, internal};
use crate::cast::packed::PackedWeight;
use crate::cast::quantizer::Quantizer;
use crate::cast::tensor::Fp8Tensor;
use crate::device::{GemmOutput, backend};
use crate::graph::wide::value::Value;
use crate::graph::{Ready, attach_all};
use candle_core::{DType, Tensor};
use fp8_core::Contraction::{self, Cols, Rows};
use std::cell::{OnceCell, RefCell};

/// What the backward pass needs of the forward pass.
#[derive(Debug, Clone, Default)]
pub(crate) struct Saved {
    pub(crate) casts: backward::Saved<Fp8Tensor>,
    frozen: Option<Frozen>,
}

/// The weight of a layer that has only FP8 codes.
#[derive(Debug, Clone)]
enum Frozen {
    Codes(Fp8Tensor),
    Packed(PackedWeight),
}

impl Saved {
    /// The same with these codes of x.
    pub(crate) fn with_input(&self, codes: Fp8Tensor) -> Self {
        let mut saved = self.clone();
        saved.casts.input = Some(codes);
        saved
    }

    /// Keeps a weight that has only FP8 codes.
    pub(crate) fn keep_frozen(&mut self, x_tracks: bool, weight: LinearWeight<'_>) {
        self.frozen = match weight {
            LinearWeight::Fp8(w8) if x_tracks => Some(Frozen::Codes(w8.clone())),
            LinearWeight::Packed(w8) if x_tracks => Some(Frozen::Packed(w8.clone())),
            _ => None,
        };
    }
}

/// `result` `[.., N]` as a node whose arguments are x, the weight unless it is FP8 codes, and the bias if there is one.
pub(super) fn attach(
    result: Ready,
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    plan: &LinearPlan,
    saved: Saved,
) -> Result<Tensor> {
    let args: Vec<&Tensor> = [Some(x), weight, bias].into_iter().flatten().collect();
    let (plan, has) = (plan.clone(), [true, weight.is_some(), bias.is_some()]);
    attach_all("fp8_linear", &args, result, move |args, _, grad_output| {
        let mut args = args.iter().copied();
        let [x, weight, bias] = has.map(|has| args.by_ref().take(usize::from(has)).next());
        let Some(x) = x else {
            internal!("fp8_linear `{}`: no argument", plan.path);
        };
        let tracks = |arg: Option<&Tensor>| arg.is_some_and(Tensor::track_op);
        let wanted = Wanted {
            input: x.track_op(),
            weight: tracks(weight),
            bias: tracks(bias),
        };
        let of = Of {
            plan: &plan,
            saved: &saved,
            input: &RefCell::new(|| Ok(x.detach())),
            dtype: x.dtype(),
            weight,
            bias,
        };
        let [mut grad_x, grad_weight, grad_bias] =
            of.gradients(&Value::Made(grad_output.clone()), wanted)?;
        if let Some(grad) = &mut grad_x {
            *grad = grad.reshape(x.shape())?;
        }
        let gradients = [grad_x, grad_weight, grad_bias].into_iter().zip(has);
        Ok(gradients
            .filter_map(|(grad, has)| has.then_some(grad))
            .collect())
    })
}

/// A call of a layer whose gradients are asked for.
pub(crate) struct Of<'a, F> {
    pub(crate) plan: &'a LinearPlan,
    pub(crate) saved: &'a Saved,
    /// x in high precision, where it is needed.
    pub(crate) input: &'a RefCell<F>,
    /// dtype of x.
    pub(crate) dtype: DType,
    pub(crate) weight: Option<&'a Tensor>,
    pub(crate) bias: Option<&'a Tensor>,
}

impl<F: FnMut() -> Result<Tensor>> Of<'_, F> {
    /// The gradients of x `[M, K]`, weight and bias.
    pub(crate) fn gradients(
        &self,
        grad_output: &Value,
        wanted: Wanted,
    ) -> Result<[Option<Tensor>; 3]> {
        let pass = Backward {
            of: self,
            value: grad_output,
            made: OnceCell::new(),
        };
        gradients(&pass, self.plan, &self.saved.casts, wanted)
    }
}

/// One backward pass.
struct Backward<'a, F> {
    of: &'a Of<'a, F>,
    /// The gradient of the output, of any shape.
    value: &'a Value,
    /// It as a matrix, once somebody has asked for it.
    made: OnceCell<Tensor>,
}

impl<F: FnMut() -> Result<Tensor>> Backward<'_, F> {
    fn weight(&self) -> Result<&Tensor> {
        match self.of.weight {
            Some(weight) => Ok(weight),
            None => internal!("fp8_linear `{}`: no weight to cast", self.of.plan.path),
        }
    }

    /// After its values were read.
    fn check_weight(&self) -> Result<()> {
        match self.of.weight {
            Some(weight) => self.of.saved.casts.check(weight, &self.of.plan.path),
            None => Ok(()),
        }
    }

    /// The gradient of the output, `[M, N]`.
    fn go(&self) -> Result<&Tensor> {
        if let Some(go) = self.made.get() {
            return Ok(go);
        }
        let (m, n) = matrix_dims(self.value.dims());
        let go = self.value.get()?.contiguous()?.reshape((m, n))?;
        Ok(self.made.get_or_init(|| go))
    }

    /// `[M, K]`
    fn input(&self) -> Result<Tensor> {
        let x = (self.of.input.borrow_mut())()?;
        let k = x.dims().last().copied().unwrap_or(0);
        let (m, _) = matrix_dims(self.value.dims());
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
        let storage = multiply(a, b, &out, self.of.plan.emulate)?;
        Ready::new(storage, shape)?.into_tensor()
    }
}

impl<F: FnMut() -> Result<Tensor>> Layer for Backward<'_, F> {
    type Cast = Fp8Tensor;

    fn is_frozen(&self) -> bool {
        self.of.weight.is_none()
    }

    fn cast(
        &self,
        which: Which,
        quantizer: &Quantizer,
        contraction: Contraction,
        both: bool,
    ) -> Result<Fp8Tensor> {
        let x = match which {
            Which::Input => self.input()?,
            Which::Weight => {
                let weight = self.weight()?;
                let codes = quantizer.quantize_for(weight, contraction, both)?.tensor;
                self.check_weight()?;
                return Ok(codes);
            }
            Which::GradOutput => {
                if let (Cols, Some(cast)) = (contraction, self.value.cast(quantizer, both)?) {
                    return Ok(cast.tensor);
                }
                self.go()?.clone()
            }
        };
        Ok(quantizer.quantize_for(&x, contraction, both)?.tensor)
    }

    fn grad_bias(&self, cast: Option<&Quantizer>) -> Result<(Tensor, Option<Fp8Tensor>)> {
        let dtype = self.of.bias.map_or(self.value.dtype(), Tensor::dtype);
        let go = self.go()?;
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
        let dtype = self.of.bias.map_or(self.value.dtype(), Tensor::dtype);
        let both_done = self.value.cast_and_sum(quantizer, both, dtype)?;
        Ok(both_done.map(|(cast, sums)| (sums, cast.tensor)))
    }

    /// `go weight`, `[M, K]`.
    fn grad_input(&self, operands: Operands<Fp8Tensor>) -> Result<Tensor> {
        let dtype = self.of.dtype;
        match operands {
            Operands::HighPrecision => {
                let go = self.go()?;
                let weight = match (self.of.weight, &self.of.saved.frozen) {
                    (Some(weight), _) => weight.detach().to_dtype(go.dtype())?,
                    // A frozen FP8 weight has no state for gradients, so they are computed from its dequantized value.
                    (None, Some(Frozen::Codes(w8))) => w8.dequantize(go.dtype())?,
                    (None, Some(Frozen::Packed(w8))) => w8.dequantize(go.dtype())?,
                    (None, None) => internal!(
                        "fp8_linear `{}`: no weight to make grad_input from",
                        self.of.plan.path
                    ),
                };
                let grad = go.matmul(&weight)?;
                self.check_weight()?;
                Ok(grad)
            }
            Operands::OneCast(weight) => {
                let (go, weight) = (
                    self.go()?.to_dtype(DType::F32)?,
                    weight.dequantize(DType::F32)?,
                );
                Ok(go.matmul(&weight)?.to_dtype(dtype)?)
            }
            Operands::Cast {
                grad_output,
                other,
                use_fast_accum,
            } => self.product((&grad_output, Cols), (&other, Rows), dtype, use_fast_accum),
        }
    }

    /// `go^T x`, `[N, K]`.
    fn grad_weight(&self, operands: Operands<Fp8Tensor>) -> Result<Tensor> {
        let dtype = self.weight()?.dtype();
        match operands {
            Operands::HighPrecision => {
                let go = self.go()?;
                let product = backend(go.device())?.transposed_product(go, &self.input()?)?;
                Ok(product.to_dtype(dtype)?)
            }
            Operands::OneCast(x) => {
                let (go, x) = (self.go()?.to_dtype(DType::F32)?, x.dequantize(DType::F32)?);
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
