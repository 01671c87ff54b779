//! One tensor of a layer: its content, name, dtype and shape in a file.

use crate::contents::Described;
use crate::error::{Error, Result};
use crate::scheme::grid;
use candle_core::{DType, Tensor};
use fp8_candle::{Fp8Tensor, InputScaling};
use fp8_core::E8M0;

/// What a tensor of a layer holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Codes,
    WeightScale,
    InputScale,
}

/// Where a part of a layer is stored.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Layout {
    pub(crate) part: Part,
    /// Name after the layer's path.
    pub(crate) own: &'static str,
    pub(crate) dtype: DType,
    pub(crate) dims: Vec<usize>,
}

impl Described {
    /// Shape of the grid of the weight's scales.
    pub(super) fn grid(&self) -> Vec<usize> {
        let (n, k) = self.sizes;
        let grid = grid(self.scheme.weight, n, k);
        vec![grid.scale_rows(), grid.scale_cols()]
    }
}

impl Layout {
    pub(super) fn codes(layer: &Described) -> Self {
        Self {
            part: Part::Codes,
            own: "weight",
            dtype: DType::F8E4M3,
            dims: vec![layer.sizes.0, layer.sizes.1],
        }
    }

    /// f32 numbers.
    pub(super) fn scale(part: Part, own: &'static str, dims: Vec<usize>) -> Self {
        Self {
            part,
            own,
            dtype: DType::F32,
            dims,
        }
    }

    /// Bytes that encode powers of two.
    pub(super) fn exponents(own: &'static str, dims: Vec<usize>) -> Self {
        Self {
            part: Part::WeightScale,
            own,
            dtype: DType::U8,
            dims,
        }
    }

    /// The tensor itself.
    pub(crate) fn tensor(
        &self,
        path: &str,
        codes: &Fp8Tensor,
        input: &InputScaling,
    ) -> Result<Tensor> {
        let refused = |reason: &str| Error::not_exportable(path, reason);
        let tensor = match self.part {
            Part::Codes => codes.to_f8e4m3()?,
            Part::WeightScale if self.dtype == DType::U8 => exponents(codes.dequant_scale())?
                .ok_or_else(|| refused("a scale of its weight is not a power of two"))?,
            Part::WeightScale => {
                let scale = codes.dequant_scale();
                let count: usize = self.dims.iter().product();
                match scale.elem_count() {
                    // The number is repeated for each row.
                    1 if count > 1 => scale.flatten_all()?.broadcast_as(count)?.contiguous()?,
                    _ => scale.clone(),
                }
            }
            Part::InputScale => match input {
                InputScaling::Static(scale) => scale.clone(),
                _ => return Err(refused("its inputs have no static scale")),
            },
        };
        Ok(tensor.reshape(self.dims.as_slice())?)
    }
}

/// The E8M0 bytes of powers of two; None if any number is not one.
fn exponents(scale: &Tensor) -> Result<Option<Tensor>> {
    let values = scale.flatten_all()?.to_vec1::<f32>()?;
    let byte = |value: &f32| {
        let scale = E8M0::from_f32(*value);
        (scale.to_f32() == *value).then(|| scale.to_bits())
    };
    let bytes: Option<Vec<u8>> = values.iter().map(byte).collect();
    bytes
        .map(|bytes| Ok(Tensor::from_vec(bytes, scale.dims(), scale.device())?))
        .transpose()
}
