//! The autograd node of a convolution.

use super::columns::settled;
use super::geometry::Geometry;
use super::operand::Weight;
use super::products::{gather, spread, weigh};
use super::values::Values;
use crate::base::data::storage::tensor_of;
use crate::base::data::window::Window;
use crate::base::error::{Result, internal};
use crate::cast::quantizer::Quantizer;
use crate::device::backend;
use crate::graph::{Ready, attach_all};
use crate::layers::linear::{Layer, LinearPlan, Operands, Saved, Wanted, Which, gradients};
use candle_core::{DType, Storage, Tensor};
use fp8_core::Contraction::{self, Cols, Rows};

/// What one call computes: a convolution, or a transposed one, which swaps input and output.
#[derive(Debug, Clone)]
pub(super) struct Convolution {
    pub(super) geometry: Geometry,
    pub(super) transposed: bool,
}

impl Convolution {
    /// `[batch, channels, height, width]` of the input.
    pub(super) fn input_dims(&self) -> [usize; 4] {
        match self.transposed {
            false => self.geometry.window.dims(),
            true => self.geometry.maps().dims(),
        }
    }

    /// `[batch, channels, height, width]` of the output.
    pub(super) fn output_dims(&self) -> [usize; 4] {
        match self.transposed {
            false => self.geometry.maps().dims(),
            true => self.geometry.window.dims(),
        }
    }

    /// Which dimension of the weight the forward pass sums over.
    pub(super) fn forward_contraction(&self) -> Contraction {
        match self.transposed {
            false => Cols,
            true => Rows,
        }
    }

    /// Which one grad_input sums over.
    fn backward_contraction(&self) -> Contraction {
        match self.transposed {
            false => Rows,
            true => Cols,
        }
    }

    /// The output, in `dtype`. To `emulate`, values are multiplied in f32 instead of codes.
    pub(super) fn output(
        &self,
        x: Values,
        weight: &Values,
        bias: Option<&Tensor>,
        dtype: DType,
        (emulate, use_fast_accum): (bool, bool),
    ) -> Result<Storage> {
        let (x, weight) = self.pair(x.reshape(&self.input_dims())?, weight, emulate)?;
        let product = if self.transposed { spread } else { gather };
        product(&self.geometry, &x, &weight, bias, dtype, use_fast_accum)
    }

    fn grad_input(
        &self,
        go: Values,
        weight: &Values,
        dtype: DType,
        (emulate, use_fast_accum): (bool, bool),
    ) -> Result<Storage> {
        let (go, weight) = self.pair(go.reshape(&self.output_dims())?, weight, emulate)?;
        let product = if self.transposed { gather } else { spread };
        product(&self.geometry, &go, &weight, None, dtype, use_fast_accum)
    }

    /// Both as codes, or both as values.
    fn pair(&self, images: Values, weight: &Values, emulate: bool) -> Result<(Values, Weight)> {
        let weight = Weight::new(weight, &self.geometry)?;
        match emulate || images.is_high_precision() || !weight.splits()? {
            true => Ok((images.emulated()?, weight.emulated()?)),
            false => Ok((images, weight)),
        }
    }

    /// In f32.
    fn grad_weight(
        &self,
        go: Values,
        x: Values,
        (emulate, use_fast_accum): (bool, bool),
    ) -> Result<Tensor> {
        let mut go = go.reshape(&self.output_dims())?;
        let mut x = x.reshape(&self.input_dims())?;
        if emulate || go.is_high_precision() {
            (go, x) = (go.emulated()?, x.emulated()?);
        }
        let (maps, images) = if self.transposed { (x, go) } else { (go, x) };
        weigh(&self.geometry, &maps, &images, use_fast_accum)
    }
}

/// A convolution, its casts, and what its backward pass keeps of the forward pass.
pub(super) struct ConvOp {
    pub(super) convolution: Convolution,
    pub(super) plan: LinearPlan,
    pub(super) saved: Saved<Values>,
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
            let wanted = Wanted {
                input: x.track_op(),
                weight: weight.track_op(),
                bias: bias.is_some_and(Tensor::track_op),
            };
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

impl Layer for Backward<'_> {
    type Cast = Values;

    fn cast(&self, which: Which, quantizer: &Quantizer, _: Contraction, _: bool) -> Result<Values> {
        match which {
            Which::Input => Values::images(self.x, quantizer),
            Which::GradOutput => Values::images(&self.go, quantizer),
            Which::Weight => {
                let convolution = &self.op.convolution;
                let contraction = convolution.backward_contraction();
                let geometry = &convolution.geometry;
                let granularity = quantizer.spec.granularity;
                let matrix = Weight::matrix(self.weight, geometry, granularity, contraction)?;
                let codes = quantizer.quantize(&matrix, contraction)?.tensor;
                self.op.saved.check(self.weight, &self.op.plan.path)?;
                Ok(Values::Fp8(codes))
            }
        }
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
