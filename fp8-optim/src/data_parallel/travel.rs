//! How gradients travel to the rank that adds them.

use crate::error::Result;
use candle_core::{DType, Tensor};
use fp8_candle::{Fp8Tensor, Quantizer};
use fp8_core::{Contraction, Format, Granularity};
use fp8_ranks::{ProcessGroup, ReduceOp, Started};

/// The form in which gradients travel to the rank that adds them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum GradientTravel {
    /// Unchanged.
    #[default]
    Unchanged,
    /// As E4M3 codes with a scale for every 128 values, 1.03 bytes for each; the sums are made in f32 and travel back in f32: 5.03 bytes
    /// for each value in place of 8. A rank also casts the gradients that it adds itself, so results depend on the number of ranks alone.
    /// Gradients leave after the backward pass, not during it.
    Fp8,
}

/// Values that share a scale.
const GROUP: usize = 128;

/// A sum over the ranks that is under way, or done.
pub(super) enum Sum {
    Started(Started),
    Done(Tensor),
}

impl Sum {
    /// Starts the sum of a flat tensor over the ranks.
    pub(super) fn start(
        flat: &Tensor,
        travel: GradientTravel,
        group: &ProcessGroup,
    ) -> Result<Self> {
        match travel {
            GradientTravel::Unchanged => {
                Ok(Self::Started(group.start_all_reduce(flat, ReduceOp::Sum)?))
            }
            GradientTravel::Fp8 => Ok(Self::Done(sum_of_codes(flat, group)?)),
        }
    }

    pub(super) fn advance(self) -> Result<Self> {
        match self {
            Self::Started(started) => Ok(Self::Started(started.advance()?)),
            done => Ok(done),
        }
    }

    pub(super) fn wait(self) -> Result<Tensor> {
        match self {
            Self::Started(started) => Ok(started.wait()?),
            Self::Done(sum) => Ok(sum),
        }
    }
}

/// The sum over the ranks of what E4M3 keeps of `flat`, in its dtype.
fn sum_of_codes(flat: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
    let (len, ranks) = (flat.elem_count(), group.size());
    // The same number of whole groups for each rank.
    let share = len.div_ceil(GROUP).div_ceil(ranks);
    let rows = share * ranks;
    if rows == 0 {
        return Ok(flat.clone());
    }
    let padded = flat
        .to_dtype(DType::F32)?
        .pad_with_zeros(0, 0, rows * GROUP - len)?;
    let cast = Quantizer::dynamic(Format::E4M3, Granularity::Rowwise);
    let codes = cast
        .quantize(&padded.reshape((rows, GROUP))?, Contraction::Cols)?
        .tensor;
    let counts = vec![share; ranks];
    let scales = codes.dequant_scale().flatten_all()?;
    let codes = group.all_to_all(codes.codes(), &counts, &counts)?;
    let scales = group.all_to_all(&scales, &counts, &counts)?;
    let mut sum: Option<Tensor> = None;
    for rank in 0..ranks {
        let part = |x: &Tensor| x.narrow(0, rank * share, share)?.contiguous();
        let piece = Fp8Tensor::from_parts(
            part(&codes)?,
            Format::E4M3,
            Granularity::Rowwise,
            Contraction::Cols,
            part(&scales)?,
        )?;
        let piece = piece.dequantize(DType::F32)?;
        sum = Some(match sum {
            None => piece,
            Some(sum) => (sum + piece)?,
        });
    }
    let sum = match sum {
        Some(sum) => group.all_gather(&sum, &counts)?,
        None => padded,
    };
    Ok(sum
        .flatten_all()?
        .narrow(0, 0, len)?
        .to_dtype(flat.dtype())?)
}
