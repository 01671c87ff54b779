//! What a name of the file stands for, and when two of them are the same.

use crate::error::Result;
use crate::module::{Fp8Layer, has_same_bits, has_same_values};
use crate::nn::{InputScaling, StaticWeight};
use candle_core::Tensor;
use fp8_files::scheme::LayerScheme;

/// What a name was taken from.
pub(super) enum Source {
    /// A parameter or a buffer.
    Tensor(Tensor),
    /// The weight of a layer that was loaded in FP8.
    Fp8(Box<StaticWeight>),
}

impl Source {
    pub(super) fn of_weight(layer: &dyn Fp8Layer) -> Self {
        match layer.static_weight() {
            Some(weight) => Self::Fp8(Box::new(weight.clone())),
            None => Self::Tensor(layer.held_weight().clone()),
        }
    }

    /// The tensor that clones of a layer share.
    pub(super) fn held(&self) -> &Tensor {
        match self {
            Self::Tensor(tensor) => tensor,
            Self::Fp8(weight) => weight.weight().held(),
        }
    }

    /// Whether a file would hold the same for both. A layer that is built twice from one file has two tensors with the same bits.
    pub(super) fn is_same(&self, other: &Self) -> Result<bool> {
        if self.held().id() == other.held().id() {
            return Ok(true);
        }
        match (self, other) {
            (Self::Tensor(a), Self::Tensor(b)) => has_same_values(a, b),
            (Self::Fp8(a), Self::Fp8(b)) => is_same_weight(a, b),
            _ => Ok(false),
        }
    }
}

fn is_same_weight(a: &StaticWeight, b: &StaticWeight) -> Result<bool> {
    let [scheme, other] =
        [a, b].map(|weight| LayerScheme::of(weight.weight().granularity(), weight.input_scaling()));
    if scheme != other || a.weight().format() != b.weight().format() {
        return Ok(false);
    }
    if let (InputScaling::Static(a), InputScaling::Static(b)) =
        (a.input_scaling(), b.input_scaling())
        && !has_same_bits(a, b)?
    {
        return Ok(false);
    }
    let (a, b) = (a.weight().unpack()?, b.weight().unpack()?);
    Ok(
        has_same_bits(a.dequant_scale(), b.dequant_scale())?
            && has_same_bits(a.codes(), b.codes())?,
    )
}
