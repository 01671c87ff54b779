//! The tensor of a value, which may not be computed yet.
//!
//! The result of a norm or an activation is read by casts alone, most of the time. Then tasks make a few rows of it at a time, in
//! their core's cache, and cast them, which saves a write to memory and a read. The tensor is computed when it is asked for.

use crate::base::data::made::Made;
use crate::base::error::Result;
use crate::cast::quantizer::Quantizer;
use crate::cast::tensor::Quantized;
use candle_core::{DType, Device, Tensor};
use std::sync::{Arc, OnceLock};

#[derive(Clone)]
pub(crate) enum Value {
    Made(Tensor),
    Rows(Arc<Rows>),
}

/// A value whose rows can be cast as they are computed.
pub(crate) struct Rows {
    dims: Vec<usize>,
    dtype: DType,
    device: Device,
    made: OnceLock<Tensor>,
    source: Box<dyn RowSource>,
}

/// How a value is computed.
pub(crate) trait RowSource: Send + Sync {
    /// The tensor.
    fn make(&self) -> Result<Tensor>;

    /// Its codes for a product over the columns (with `both`, for one over the rows too), if `quantizer` knows its scale and
    /// nothing else reads the tensor.
    fn cast(&self, quantizer: &Quantizer, both: bool) -> Result<Option<Quantized>>;

    /// The same, and the sums over rows in a dtype, if a device does that in one pass.
    fn cast_and_sum(
        &self,
        _: &Quantizer,
        _: bool,
        _: DType,
    ) -> Result<Option<(Quantized, Tensor)>> {
        Ok(None)
    }
}

impl Value {
    /// The value of these sizes, which `source` computes when it is needed.
    pub(crate) fn later(
        dims: &[usize],
        dtype: DType,
        device: &Device,
        source: impl RowSource + 'static,
    ) -> Self {
        Self::Rows(Arc::new(Rows {
            dims: dims.to_vec(),
            dtype,
            device: device.clone(),
            made: OnceLock::new(),
            source: Box::new(source),
        }))
    }

    pub(crate) fn get(&self) -> Result<&Tensor> {
        match self {
            Self::Made(tensor) => Ok(tensor),
            Self::Rows(rows) => match rows.made.get() {
                Some(tensor) => Ok(tensor),
                None => {
                    let made = rows.source.make()?;
                    Ok(rows.made.get_or_init(|| made))
                }
            },
        }
    }

    /// The codes, unless the tensor was computed before or is needed.
    pub(crate) fn cast(&self, quantizer: &Quantizer, both: bool) -> Result<Option<Quantized>> {
        match self {
            Self::Rows(rows) if rows.made.get().is_none() => rows.source.cast(quantizer, both),
            _ => Ok(None),
        }
    }

    /// The codes and the sums over rows, if a device does that in one pass.
    pub(crate) fn cast_and_sum(
        &self,
        quantizer: &Quantizer,
        both: bool,
        dtype: DType,
    ) -> Result<Option<(Quantized, Tensor)>> {
        let made = match self {
            Self::Made(tensor) => tensor,
            Self::Rows(rows) => match rows.made.get() {
                Some(tensor) => tensor,
                None => return rows.source.cast_and_sum(quantizer, both, dtype),
            },
        };
        let cast = quantizer.quantize_and_sum(&Made::Stored(made), both, Some(dtype))?;
        Ok(cast.and_then(|(quantized, sums)| Some((quantized, sums?))))
    }

    /// A tensor of the same shape, dtype and device; its elements are meaningless unless the value was computed.
    pub(crate) fn shaped(&self) -> Result<Tensor> {
        match self {
            Self::Made(tensor) => Ok(tensor.clone()),
            Self::Rows(rows) => match rows.made.get() {
                Some(tensor) => Ok(tensor.clone()),
                None => {
                    let one = Tensor::zeros(1, rows.dtype, &rows.device)?;
                    Ok(one.broadcast_as(rows.dims.as_slice())?)
                }
            },
        }
    }

    pub(crate) fn dims(&self) -> &[usize] {
        match self {
            Self::Made(tensor) => tensor.dims(),
            Self::Rows(rows) => &rows.dims,
        }
    }

    pub(crate) fn device(&self) -> &Device {
        match self {
            Self::Made(tensor) => tensor.device(),
            Self::Rows(rows) => &rows.device,
        }
    }

    pub(crate) fn dtype(&self) -> DType {
        match self {
            Self::Made(tensor) => tensor.dtype(),
            Self::Rows(rows) => rows.dtype,
        }
    }
}
