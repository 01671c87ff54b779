//! Factors that move from inputs into weights: shifts.
//!
//! A norm multiplies each feature by a weight of its own. If a feature's weight is multiplied by a number, and in the layers that read the
//! norm's result the column of that feature is divided by it, the model computes what it did. With powers of two it does so to the bit, in
//! high precision. In FP8 the features that share a scale then differ less in size, so fewer of the small ones end below the smallest steps.
//! With other numbers results differ by roundings of f32; features may then lie where E4M3 rounds them less.

use crate::error::Result;
use candle_core::{D, DType, Tensor};

/// The parts of the features' differences in size that are tried: how much of it moves into the weights.
const PARTS: [f32; 4] = [0.25, 0.5, 0.75, 1.];

/// The largest exponent in either direction.
const LARGEST: f32 = 24.;

/// Shifts to try for the features of an input, given the largest magnitudes of each feature in the inputs and in the weights that they are
/// multiplied with. Each shift has a power of two for each feature: the input is to be multiplied by it, and the weights are to be divided
/// by it. One that changes nothing is left out.
///
/// ```
/// use fp8_files::search::shifts_to_try;
/// let shifts = shifts_to_try(&[1., 1., 4096.], &[0.1, 0.1, 0.1]);
/// assert!(shifts.contains(&vec![1., 1., 1. / 4096.]));
/// ```
pub fn shifts_to_try(inputs: &[f32], weights: &[f32]) -> Vec<Vec<f32>> {
    let log = |x: &f32| Some(x.log2()).filter(|log| log.is_finite());
    let sizes = inputs.iter().zip(weights);
    let sizes: Vec<Option<(f32, f32)>> = sizes.map(|(x, w)| Some((log(x)?, log(w)?))).collect();
    let mut shifts: Vec<Vec<f32>> = vec![];
    for part in PARTS {
        let wanted = |(x, w): (f32, f32)| (1. - part) * w - part * x;
        let mut known: Vec<f32> = sizes.iter().flatten().map(|size| wanted(*size)).collect();
        let middle = known.len() / 2;
        if known.is_empty() {
            break;
        }
        // Scales take what all have in common.
        let common = *known.select_nth_unstable_by(middle, f32::total_cmp).1;
        let power = |size: Option<(f32, f32)>| {
            let exponent = size.map_or(0., |size| (wanted(size) - common).round());
            exponent.clamp(-LARGEST, LARGEST).exp2()
        };
        let shift: Vec<f32> = sizes.iter().map(|size| power(*size)).collect();
        if shift.iter().any(|factor| *factor != 1.) && !shifts.contains(&shift) {
            shifts.push(shift);
        }
    }
    shifts
}

/// `x` with its last dimension multiplied by the factors of `shift`, in its own dtype.
///
/// # Errors
/// If there are more or fewer factors than features.
pub fn shifted(x: &Tensor, shift: &[f32]) -> Result<Tensor> {
    let wide = match x.dtype() {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let factors = Tensor::from_slice(shift, shift.len(), x.device())?.to_dtype(wide)?;
    let product = x.to_dtype(wide)?.broadcast_mul(&factors)?;
    Ok(product.to_dtype(x.dtype())?)
}

/// The inverse of each factor.
pub fn inverse_shift(shift: &[f32]) -> Vec<f32> {
    shift.iter().map(|factor| factor.recip()).collect()
}

/// Whether `x`, kept in `dtype`, loses nothing when its last dimension is multiplied by the factors of `shift`.
///
/// # Errors
/// As [`shifted`].
pub fn shifts_exactly(x: &Tensor, shift: &[f32], dtype: DType) -> Result<bool> {
    let kept = x.to_dtype(dtype)?;
    let back = shifted(&shifted(&kept, shift)?, &inverse_shift(shift))?;
    let difference = (back.to_dtype(DType::F64)? - kept.to_dtype(DType::F64)?)?;
    let largest = difference.abs()?.flatten(0, D::Minus1)?.max(0)?;
    // NaN where Inf came about.
    Ok(largest.to_scalar::<f64>()? == 0.)
}
