//! Some rows of a value, for tensors that are too large to be read at once.

use super::Checkpoint;
use super::catalogue::{Value, Weight};
use super::family::Order;
use crate::error::Result;
use candle_core::{DType, Device, Tensor};
use fp8_candle::Fp8Tensor;
use fp8_core::{Contraction, Format, Granularity};
use std::ops::Range;

impl Checkpoint {
    /// Rows of what `value` gives for a floating point `dtype`; None for a tensor whose rows lie elsewhere in the file.
    pub(crate) fn rows(
        &self,
        name: &str,
        rows: Range<usize>,
        dtype: DType,
    ) -> Result<Option<Tensor>> {
        if let Some(weight) = self.catalogue.weights.get(name) {
            return match weight.codes.order {
                Order::Rotary { .. } => Ok(None),
                _ => self.fp8_rows(weight, rows, dtype).map(Some),
            };
        }
        match self.catalogue.values.get(name) {
            Some(Value::Tensor(stored)) if !matches!(stored.order, Order::Rotary { .. }) => {
                let file = self.files.file(stored);
                let part = file.rows(&stored.name, rows, &Device::Cpu)?;
                Ok(Some(part.to_dtype(dtype)?))
            }
            _ => Ok(None),
        }
    }

    fn fp8_rows(&self, weight: &Weight, rows: Range<usize>, dtype: DType) -> Result<Tensor> {
        let ([n, k], granularity) = (weight.shape, weight.scheme.weight);
        let block = match granularity {
            Granularity::Blockwise { rows, .. } => rows,
            _ => 1,
        };
        // From the beginning of a block on.
        let (first, end) = (rows.start / block * block, rows.end.min(n));
        let codes = self.files.codes_of_rows(weight, first..end)?;
        let codes = Tensor::from_vec(codes, (end - first, k), &Device::Cpu)?;
        let scales = self.files.scales(weight, &Device::Cpu)?;
        let scales = match granularity {
            Granularity::Tensorwise => scales,
            _ => scales.narrow(0, first / block, end.div_ceil(block) - first / block)?,
        };
        let (format, contraction) = (Format::E4M3, Contraction::Cols);
        let scales = scales.contiguous()?;
        let part = Fp8Tensor::from_parts(codes, format, granularity, contraction, scales)?;
        let skipped = rows.start - first;
        Ok(part
            .dequantize(dtype)?
            .narrow(0, skipped, end - rows.start)?)
    }
}
