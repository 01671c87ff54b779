//! Casts of tensors that are computed row by row for it.

use super::{Made, Quantized, Quantizer, scales_of};
use crate::data::matrix_dims;
use crate::device::{Codes, encode_filled};
use crate::error::Result;
use crate::profile::{Kind, enter};
use crate::recall::Recall;
use crate::scale_source::{FirstScale, ScaleSource};
use candle_core::{Device, Tensor};
use fp8_core::{Contraction, Granularity, HighPrecision, ScaleGrid};

impl Quantizer {
    /// [`Quantizer::quantize`] for a product over the columns, of the tensor of shape `dims` on the CPU whose elements from `start` on
    /// `fill(start, rows)` writes, whole rows at a time. None where that is not enough: where the scale follows from the
    /// tensor itself or there are several, where rounding is stochastic, and where a hook wants to see the tensor.
    pub(crate) fn quantize_rows<T: HighPrecision>(
        &self,
        dims: &[usize],
        fill: impl Fn(usize, &mut [T]) + Sync,
    ) -> Result<Option<Quantized>> {
        let whole = self.granularity == Granularity::Tensorwise;
        if !whole || self.stochastic.is_some() || self.hook.is_some() {
            return Ok(None);
        }
        let known = match &self.source {
            ScaleSource::Delayed { slot, first, .. } => {
                *first != FirstScale::OwnAmax || !slot.is_initial()?
            }
            ScaleSource::Static(_) => true,
            _ => false,
        };
        if !known {
            return Ok(None);
        }
        let _scope = enter(Kind::Cast);
        let noted = self.recall.as_ref().and_then(Recall::next);
        let format = self.cast.format;
        let (quant_scale, dequant_scale) = match (scales_of(&noted), &self.source) {
            (Some(scales), _) => scales,
            (None, ScaleSource::Delayed { slot, rule, .. }) => slot.delayed_scale(format, rule)?,
            (None, ScaleSource::Static(slot)) => slot.static_scale(format)?,
            (None, _) => return Ok(None),
        };
        let (rows, cols) = matrix_dims(dims);
        let grid = ScaleGrid::tensorwise(rows, cols);
        let (codes, amax) = encode_filled(&grid, &quant_scale, &self.cast, fill)?;
        let repeated = noted.is_some();
        let records = !repeated && self.observer.as_ref().is_some_and(|o| o.record);
        let amax = match records {
            true => Some(Tensor::from_slice(&[amax], 1, &Device::Cpu)?),
            false => None,
        };
        let made = Made {
            codes: Codes {
                row_major: Some(codes.reshape(dims)?),
                transposed: None,
            },
            scales: [quant_scale, dequant_scale],
            amax,
            cast: self.cast,
        };
        self.finish(made, dims, Contraction::Cols, repeated)
            .map(Some)
    }
}
