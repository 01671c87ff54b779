//! A moment as an optimizer keeps it.

use std::collections::HashMap;

use candle_core::{DType, Device, Result, Shape, Tensor};
use fp8_core::{EXPANDED_CURVES, Expansion};

use super::super::error;
use super::super::rule::Moment;
use super::super::state_reader::StateReader;
use super::coded::{AMAXES, CURVES, Coded};
use super::coding::{BLOCK, Coding, Random};
use super::storage::MomentStorage;

/// A moment of a variable.
pub enum Kept {
    /// In f32, or in f64 for an f64 variable, on the variable's device.
    Values(Tensor),
    /// In FP8, there too.
    Coded(Coded),
}

impl Kept {
    /// A moment of zeros. `dtype` is that of values; those in f64 are not coded.
    pub(crate) fn zeros(
        storage: MomentStorage,
        shape: &Shape,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        match storage {
            MomentStorage::Fp8(_) if dtype == DType::F32 => {
                Coded::zeros(shape, device).map(Self::Coded)
            }
            _ => Tensor::zeros(shape, dtype, device).map(Self::Values),
        }
    }

    /// The moment as values, in f32 or f64.
    pub(crate) fn values(&self, device: &Device) -> Result<Tensor> {
        match self {
            Self::Values(values) => Ok(values.clone()),
            Self::Coded(coded) => coded.values(device),
        }
    }

    /// The values of a step, stored as `storage` says. Codes are rounded by `random`.
    pub(crate) fn of(
        values: Tensor,
        storage: MomentStorage,
        moment: &Moment,
        random: Option<Random>,
    ) -> Result<Self> {
        match coding(storage, moment, random) {
            Some(coding) if values.dtype() == DType::F32 => {
                Coded::of(&values, coding).map(Self::Coded)
            }
            _ => bounded(values, moment).map(Self::Values),
        }
    }

    /// The same moment in another storage. Values are rounded to nearest.
    pub(crate) fn stored(
        &self,
        storage: MomentStorage,
        moment: &Moment,
        device: &Device,
    ) -> Result<Self> {
        match (self, storage) {
            (Self::Coded(coded), MomentStorage::Fp8(_)) => Ok(Self::Coded(coded.clone())),
            (Self::Coded(coded), MomentStorage::F32) => coded.values(device).map(Self::Values),
            (Self::Values(values), _) => Self::of(values.clone(), storage, moment, None),
        }
    }

    /// Adds copies to a state.
    pub(crate) fn save(&self, name: &str, state: &mut HashMap<String, Tensor>) -> Result<()> {
        match self {
            Self::Values(values) => {
                state.insert(name.to_string(), values.copy()?);
            }
            Self::Coded(coded) => {
                for (suffix, tensor) in coded.tensors() {
                    state.insert(format!("{name}{suffix}"), tensor.copy()?);
                }
            }
        }
        Ok(())
    }

    /// Reads the moment `name`, in whichever storage it was saved; `dtype` is that of values. All of it is copied.
    pub(crate) fn read(
        state: &mut StateReader<'_>,
        name: &str,
        moment: &Moment,
        (shape, dtype): (&Shape, DType),
        device: &Device,
    ) -> error::Result<Self> {
        // The loaded tensor may be a variable that is written to later.
        let copy = |tensor: &Tensor, device: &Device| -> Result<Tensor> {
            tensor.detach().to_device(device)?.contiguous()?.copy()
        };
        let (amaxes, curves) = (format!("{name}{AMAXES}"), format!("{name}{CURVES}"));
        if dtype != DType::F32 || !(state.has(&amaxes) || state.has(&curves)) {
            let values = state.take(name, dtype, shape, moment.non_negative)?;
            return Ok(Self::Values(copy(values, device)?));
        }
        let blocks = Shape::from(shape.elem_count().div_ceil(BLOCK));
        // Any code but NaN, and no negative code where values are never negative.
        let largest = if moment.non_negative { 0x7E } else { 0xFE };
        let is_code = |x: f64| x <= f64::from(largest) && x != f64::from(0x7F);
        let codes = state.take_where(
            name,
            DType::U8,
            shape,
            is_code,
            match moment.non_negative {
                true => "codes of E4M3 from 0 to 448",
                false => "codes of E4M3 other than NaN",
            },
        )?;
        let amaxes = state.take(&amaxes, DType::F32, &blocks, true)?;
        let is_curve = |x: f64| x < f64::from(EXPANDED_CURVES);
        let curves = state.take_where(&curves, DType::U8, &blocks, is_curve, "at most 3")?;
        Ok(Self::Coded(Coded {
            codes: copy(codes, device)?,
            amaxes: copy(amaxes, device)?,
            curves: copy(curves, device)?,
        }))
    }

    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Values(values) => (values.elem_count() * values.dtype().size_in_bytes()) as u64,
            Self::Coded(coded) => coded.bytes(),
        }
    }
}

/// The values, and f32's largest number with their sign in place of those that have overflowed, as squares and sums of gradients may: what
/// the pass over host memory stores. Waits for no accelerator, and reads no memory of the host, so that a graph may record it. In f64 nothing
/// overflows: the norm of such gradients is infinite.
fn bounded(values: Tensor, moment: &Moment) -> Result<Tensor> {
    if values.dtype() != DType::F32 || values.elem_count() == 0 {
        return Ok(values);
    }
    // Of the size of the values: for a smaller one, as for a choice by a condition, candle copies sizes from the host. On CUDA devices a minimum
    // also replaces NaN, which a moment has only where its variable is NaN.
    let largest = values.zeros_like()?.affine(0., f32::MAX.into())?;
    let values = values.minimum(&largest)?;
    match moment.non_negative {
        true => Ok(values),
        false => values.maximum(&largest.neg()?),
    }
}

/// How values become codes; None where they stay values.
pub(crate) fn coding(
    storage: MomentStorage,
    moment: &Moment,
    random: Option<Random>,
) -> Option<Coding> {
    match storage {
        MomentStorage::F32 => None,
        MomentStorage::Fp8(options) => Some(Coding {
            expansion: Expansion {
                expands: options.expansion,
                non_negative: moment.non_negative,
            },
            random: random.filter(|_| options.stochastic),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the pass over host memory.
    #[test]
    fn values_that_overflow_become_the_largest_numbers() -> Result<()> {
        const INF: f32 = f32::INFINITY;
        let values = [1., -0., INF, f32::MAX, -2., -INF, f32::MIN];
        for moment in [Moment::signed("a"), Moment::non_negative("a")] {
            // A moment that is never negative has none of the last three.
            let len = if moment.non_negative { 4 } else { 7 };
            let tensor = Tensor::new(&values[..len], &Device::Cpu)?;
            let kept = Kept::of(tensor, MomentStorage::F32, &moment, None)?;
            let got = kept.values(&Device::Cpu)?.to_vec1::<f32>()?;
            let bounded = values.map(|x| x.clamp(f32::MIN, f32::MAX).to_bits());
            let got: Vec<u32> = got.iter().map(|x| x.to_bits()).collect();
            assert_eq!(got, bounded[..len], "{moment:?}");
        }
        Ok(())
    }
}
