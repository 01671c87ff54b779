//! The products of a convolution without casts and outside any graph, for arithmetic with its own rules.

use super::geometry::Geometry;
use super::operand::Weight;
use super::products::{gather, spread, weigh};
use super::shape::ConvShape;
use super::values::Values;
use crate::base::data::storage::tensor_of;
use crate::base::error::Result;
use crate::base::error::conv::ConvError;
use crate::cast::tensor::Fp8Tensor;
use candle_core::{DType, Tensor};

/// An operand of a product. Both operands are codes, or both are values.
#[derive(Debug, Clone, Copy)]
pub enum BareOperand<'a> {
    /// With one scale.
    Codes(&'a Fp8Tensor),
    /// In f32.
    Values(&'a Tensor),
}

impl BareOperand<'_> {
    fn values(self) -> Result<Values> {
        Ok(match self {
            Self::Codes(codes) => Values::Fp8(codes.clone()),
            Self::Values(values) => Values::high_precision(values)?,
        })
    }

    /// Times `factor`.
    fn times(self, factor: f32) -> Result<Values> {
        Ok(match self {
            Self::Codes(codes) => Values::Fp8(codes.with_dequant_factor(factor)?),
            Self::Values(values) => Values::high_precision(&(values * f64::from(factor))?)?,
        })
    }
}

/// The three products of a convolution, without casts and outside any graph.
#[derive(Debug, Clone)]
pub struct BareConv(Geometry);

impl BareConv {
    /// The convolution of images `[batch, channels, height, width]` and a weight `[out, channels / groups, height, width]`.
    ///
    /// # Errors
    /// If the sizes make no convolution.
    pub fn new(x: [usize; 4], weight: [usize; 4], shape: &ConvShape) -> Result<Self, ConvError> {
        Ok(Self(Geometry::new(x, weight, shape, false)?))
    }

    /// The transposed convolution of `x` `[batch, in, height, width]` and a weight `[in, channels / groups, height, width]`: the
    /// convolution with that weight whose images are its results, and whose gradient of the input it is.
    ///
    /// # Errors
    /// If the sizes make no convolution.
    pub fn transposed(
        x: [usize; 4],
        weight: [usize; 4],
        shape: &ConvShape,
    ) -> Result<Self, ConvError> {
        Ok(Self(Geometry::new(x, weight, shape, true)?))
    }

    /// `[batch, channels, height, width]` of the images.
    pub fn image_dims(&self) -> [usize; 4] {
        self.0.window.dims()
    }

    /// How many terms are summed for a value of the output, at most for one of the input's gradient, and for one of the weight's gradient.
    pub fn lengths(&self) -> [usize; 3] {
        let (window, [n, columns]) = (&self.0.window, self.0.weight_dims());
        [
            columns,
            n / self.0.groups * window.taps(),
            window.batch * window.places(),
        ]
    }

    /// `[batch, out, height, width]`.
    pub fn output_dims(&self) -> [usize; 4] {
        self.0.maps().dims()
    }

    /// `factor` times the output, in `dtype`.
    ///
    /// # Errors
    /// If the operands do not have these shapes, or one is codes and the other is not.
    pub fn output(
        &self,
        x: BareOperand<'_>,
        weight: BareOperand<'_>,
        factor: f32,
        dtype: DType,
    ) -> Result<Tensor> {
        let weight = Weight::new(&weight.times(factor)?, &self.0)?;
        let y = gather(&self.0, &x.values()?, &weight, None, dtype, false)?;
        tensor_of(y, &self.output_dims()[..])
    }

    /// `factor` times the gradient of the input, in `dtype`.
    ///
    /// # Errors
    /// If the operands do not have these shapes, or one is codes and the other is not.
    pub fn grad_input(
        &self,
        grad: BareOperand<'_>,
        weight: BareOperand<'_>,
        factor: f32,
        dtype: DType,
    ) -> Result<Tensor> {
        let weight = Weight::new(&weight.times(factor)?, &self.0)?;
        let grad = spread(&self.0, &grad.values()?, &weight, None, dtype, false)?;
        tensor_of(grad, &self.0.window.dims()[..])
    }

    /// The gradient of the weight, in f32, `[out, channels / groups * taps]`.
    ///
    /// # Errors
    /// As [`BareConv::output`].
    pub fn grad_weight(&self, grad: BareOperand<'_>, x: BareOperand<'_>) -> Result<Tensor> {
        weigh(&self.0, &grad.values()?, &x.values()?, false)
    }
}
