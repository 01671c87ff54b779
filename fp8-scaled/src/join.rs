//! Several tensors to one.

use super::arith::{Like, common};
use super::check::check_same_device;
use super::dtype::ScaledDType;
use super::error::{Result, shape};
use super::kernels::times;
use super::value::Scaled;
use candle_core::Tensor;
use fp8_core::scaled::{Scale, extreme_rule, rescale_factor};

impl Scaled {
    /// Concatenates the parts along `dim`. Scale: the largest; dtype: the common one, as in [`Scaled::add`].
    ///
    /// # Errors
    /// [`fp8_candle::Error::Shape`] if there is no part, the dimension does not exist, or another one differs in size.
    pub fn cat(parts: &[&Self], dim: usize) -> Result<Self> {
        let op = "cat";
        let Some(&first) = parts.first() else {
            return Err(shape(op, "the operand", "a part to join", &[]));
        };
        let (mut scale, mut dtype) = (Scale::ZERO, first.dtype());
        for part in parts {
            check_same_device(op, first, part)?;
            let others = |x: &Self| -> Vec<usize> {
                let mut dims = x.dims().to_vec();
                dims[dim] = 0;
                dims
            };
            let expected = match (dim < first.rank(), part.rank() == first.rank()) {
                (true, true) if others(part) == others(first) => None,
                (false, _) => Some(format!("a dimension {dim} to join along")),
                _ => Some(format!("{:?} but for dimension {dim}", first.dims())),
            };
            if let Some(expected) = expected {
                return Err(shape(op, "a part", expected, part.dims()));
            }
            scale = extreme_rule(scale, part.scale()).scale;
            // FP8 parts take the dtype of the others.
            dtype = match (dtype, part.dtype()) {
                (ScaledDType::Fp8(_), ScaledDType::Fp8(_)) => dtype,
                (a, b) => ScaledDType::Float(common(a, b)),
            };
        }
        let dtype = common(dtype, dtype);
        let data = parts
            .iter()
            .map(|part| times(op, &part.float(dtype)?, rescale_factor(part.scale(), scale)))
            .collect::<Result<Vec<Tensor>>>()?;
        let value = Self::new(Tensor::cat(&data, dim)?, scale);
        let parts_like: Vec<(Like, usize)> = parts
            .iter()
            .map(|part| (Like::of(part), part.dims()[dim]))
            .collect();
        Ok(Self::record_many(value, op, parts, move |g, wanted| {
            let mut start = 0;
            (parts_like.iter().zip(wanted))
                .map(|((like, len), wanted)| {
                    let from = start;
                    start += len;
                    wanted
                        .then(|| like.cotangent(&g.narrow(dim, from, *len)?))
                        .transpose()
                })
                .collect()
        }))
    }

    /// Stacks parts of one shape along a new dimension at `dim`. Scale and dtype as in [`Scaled::cat`].
    ///
    /// # Errors
    /// As [`Scaled::cat`].
    pub fn stack(parts: &[&Self], dim: usize) -> Result<Self> {
        let parts = parts
            .iter()
            .map(|part| part.unsqueeze(dim))
            .collect::<Result<Vec<_>>>()?;
        Self::cat(&parts.iter().collect::<Vec<_>>(), dim)
    }
}
