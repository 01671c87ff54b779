//! The backward pass of a convolution, and its node of candle's graph.

use super::columns::settled;
use super::operand::Weight;
use super::products::Convolution;
use super::values::Values;
use crate::base::data::storage::tensor_of;
use crate::base::data::window::Window;
use crate::base::error::{Result, internal};
use crate::cast::quantizer::Quantizer;
use crate::device::backend;
use crate::graph::{Ready, attach_all};
use crate::layers::linear::{BackwardProducts, LinearPlan, Operands, SavedCasts, gradients};
use candle_core::{DType, Tensor};
use fp8_core::Contraction;

/// A convolution, its casts, and what its backward pass keeps of the forward pass.
pub(super) struct ConvOp {
    pub(super) convolution: Convolution,
    pub(super) plan: LinearPlan,
    pub(super) saved: SavedCasts<Values>,
}

impl ConvOp {
    /// `result` as a node whose arguments are x, the weight, and the bias if there is one.
    pub(super) fn attach(
        self,
        name: &'static str,
        result: Ready,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        let args: Vec<&Tensor> = [x, weight].into_iter().chain(bias).collect();
        attach_all(name, &args, result, move |args, _, grad_output| {
            let [x, weight, ref bias @ ..] = *args else {
                internal!("{name}: {} arguments", args.len());
            };
            let bias = bias.first().copied();
            let wanted = [Some(x), Some(weight), bias];
            let wanted = wanted.map(|arg| arg.is_some_and(Tensor::track_op));
            let pass = Backward {
                op: &self,
                x,
                weight,
                bias,
                go: grad_output.detach().contiguous()?,
            };
            let gradients = gradients(&pass, &self.plan, &self.saved, wanted)?;
            Ok(gradients.into_iter().take(args.len()).collect())
        })
    }
}

/// One backward pass.
struct Backward<'a> {
    op: &'a ConvOp,
    x: &'a Tensor,
    weight: &'a Tensor,
    bias: Option<&'a Tensor>,
    go: Tensor,
}

impl Backward<'_> {
    /// The operands as [`Convolution`] takes them, and whether to emulate and to accumulate fast. `other` is the operand in
    /// high precision.
    fn operands(
        &self,
        operands: Operands<Values>,
        other: &Tensor,
    ) -> Result<(Values, Values, (bool, bool))> {
        Ok(match operands {
            Operands::HighPrecision => (
                Values::high_precision(&self.go)?,
                Values::high_precision(other)?,
                (true, false),
            ),
            Operands::OneCast(other) => (Values::high_precision(&self.go)?, other, (true, false)),
            Operands::Cast {
                grad_output,
                other,
                use_fast_accum,
            } => (grad_output, other, (self.op.plan.emulate, use_fast_accum)),
        })
    }
}

impl BackwardProducts for Backward<'_> {
    type Cast = Values;

    fn cast_input(&self, quantizer: &Quantizer) -> Result<Values> {
        Values::images(self.x, quantizer)
    }

    fn cast_weight(&self, quantizer: &Quantizer) -> Result<Values> {
        let convolution = &self.op.convolution;
        let contraction = convolution.backward_contraction();
        let (geometry, granularity) = (&convolution.geometry, quantizer.spec.granularity);
        let matrix = Weight::matrix(self.weight, geometry, granularity, contraction)?;
        let codes = quantizer.quantize(&matrix, contraction)?.tensor;
        self.op.saved.check(self.weight, &self.op.plan.path)?;
        Ok(Values::Fp8(codes))
    }

    fn cast_grad_output(&self, quantizer: &Quantizer, _: Contraction, _: bool) -> Result<Values> {
        Values::images(&self.go, quantizer)
    }

    /// The sum of each channel, added in f32.
    fn grad_bias(&self, cast: Option<&Quantizer>) -> Result<(Tensor, Option<Values>)> {
        let convolution = &self.op.convolution;
        let [batch, channels, height, width] = convolution.output_dims();
        let sums = |go: &Tensor| -> Result<Tensor> {
            let rows = go
                .to_dtype(DType::F32)?
                .reshape((batch * channels, height * width))?
                .sum(1)?
                .reshape((batch, channels))?;
            let dtype = self.bias.map_or(go.dtype(), Tensor::dtype);
            backend(go.device())?.sum_rows(&rows, dtype)
        };
        let Some(cast) = cast else {
            return Ok((sums(&self.go)?, None));
        };
        let maps = Window::single(batch, channels, [height, width]);
        let cast = settled(&self.go, cast, &maps, convolution.geometry.groups)?;
        let values = cast.clone().emulated()?;
        Ok((sums(values.elements())?, Some(cast)))
    }

    /// In x's shape.
    fn grad_input(&self, operands: Operands<Values>) -> Result<Tensor> {
        let dtype = self.x.dtype();
        // As the forward pass of a layer in high precision casts it.
        let weight = self.weight.detach().to_dtype(dtype)?;
        let reads = matches!(operands, Operands::HighPrecision);
        let (go, weight, how) = self.operands(operands, &weight)?;
        let grad = self.op.convolution.grad_input(go, &weight, dtype, how)?;
        if reads {
            self.op.saved.check(self.weight, &self.op.plan.path)?;
        }
        tensor_of(grad, self.x.shape())
    }

    /// In the weight's shape.
    fn grad_weight(&self, operands: Operands<Values>) -> Result<Tensor> {
        let (go, x, how) = self.operands(operands, self.x)?;
        let grad = self.op.convolution.grad_weight(go, x, how)?;
        let grad = grad.to_dtype(self.weight.dtype())?;
        Ok(grad.reshape(self.weight.shape())?)
    }
}
