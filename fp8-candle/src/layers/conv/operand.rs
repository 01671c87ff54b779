//! The weight group by group, and one product of two operands.

use super::geometry::Geometry;
use super::values::{Values, kept_block};
use crate::base::error::{Result, internal};
use crate::cast::tensor::Fp8Tensor;
use crate::device::multiply_values;
use crate::device::{GemmOutput, backend};
use crate::graph::Ready;
use candle_core::{DType, Tensor};
use fp8_core::Contraction::{self, Rows};
use fp8_core::Granularity;

/// The weight; each group is an operand.
pub(super) struct Weight {
    values: Values,
    groups: usize,
    /// The dimension along which the groups lie: the one that the product keeps, so that no two groups share a scale.
    dim: usize,
}

impl Weight {
    /// The values of `weight` in the order in which they are cast for products that sum over `contraction`: `[n, k]`, or
    /// `[n / groups, groups * k]` where scales run down the rows of a group.
    pub(super) fn matrix(
        weight: &Tensor,
        geometry: &Geometry,
        granularity: Granularity,
        contraction: Contraction,
    ) -> Result<Tensor> {
        let (groups, [n, k]) = (geometry.groups, geometry.weight_dims());
        let weight = weight.detach();
        Ok(match (granularity, contraction) {
            // One scale: any shape and order will do.
            (Granularity::Tensorwise, _) => weight,
            (_, Rows) if groups > 1 => weight
                .reshape((groups, n / groups, k))?
                .transpose(0, 1)?
                .contiguous()?
                .reshape((n / groups, groups * k))?,
            _ => weight.reshape((n, k))?,
        })
    }

    /// From a cast of [`Weight::matrix`], or from values in high precision.
    pub(super) fn new(values: &Values, geometry: &Geometry) -> Result<Self> {
        let groups = geometry.groups;
        if let Values::Fp8(x8) = values
            && x8.granularity() != Granularity::Tensorwise
        {
            let dim = match x8.contraction() {
                Rows if groups > 1 => 1,
                _ => 0,
            };
            return Ok(Self {
                values: values.clone(),
                groups,
                dim,
            });
        }
        Ok(Self {
            values: values.reshape(&geometry.weight_dims())?,
            groups,
            dim: 0,
        })
    }

    /// Whether each group has scales of its own.
    pub(super) fn splits(&self) -> Result<bool> {
        let Values::Fp8(x8) = &self.values else {
            return Ok(true);
        };
        let len = self.values.elements().dim(self.dim)? / self.groups;
        Ok(self.groups == 1 || len.is_multiple_of(kept_block(x8.granularity())))
    }

    pub(super) fn emulated(self) -> Result<Self> {
        let values = self.values.emulated()?;
        Ok(Self { values, ..self })
    }

    /// `[n / groups, k]`
    pub(super) fn of_group(&self, group: usize) -> Result<Values> {
        if self.groups == 1 {
            return Ok(self.values.clone());
        }
        let part = |x: &Tensor| -> Result<Tensor> {
            let len = x.dim(self.dim)? / self.groups;
            Ok(x.narrow(self.dim, group * len, len)?.contiguous()?)
        };
        let elements = part(self.values.elements())?;
        match &self.values {
            Values::Fp8(x8) if x8.granularity() != Granularity::Tensorwise => {
                Ok(Values::Fp8(Fp8Tensor::from_parts(
                    elements,
                    x8.format(),
                    x8.granularity(),
                    x8.contraction(),
                    part(x8.dequant_scale())?,
                )?))
            }
            values => values.with(elements),
        }
    }
}

/// `[a.kept, b.kept]` in f32, summed over a contraction of each. Both operands are FP8, or both are not.
pub(super) fn multiply(
    (a, a_contraction): (&Values, Contraction),
    (b, b_contraction): (&Values, Contraction),
    use_fast_accum: bool,
) -> Result<Tensor> {
    match (a, b) {
        (Values::Fp8(a), Values::Fp8(b)) => {
            let (a, b) = (a.operand(a_contraction), b.operand(b_contraction));
            let out = GemmOutput {
                dtype: DType::F32,
                bias: None,
                use_fast_accum,
            };
            let storage = backend(a.dequant_scale.device())?.gemm(&a, &b, &out)?;
            Ready::new(storage, (a.kept(), b.kept()))?.into_tensor()
        }
        (Values::HighPrecision(a), Values::HighPrecision(b)) => {
            multiply_values((a, a_contraction), (b, b_contraction))
        }
        _ => internal!("a product of one operand in FP8 and one that is not"),
    }
}
