//! Outliers of inputs that move into weights.
//!
//! A norm multiplies each feature by a weight of its own. If a feature's weight is multiplied by a number, and in the layers that read the
//! norm's result the column of that feature is divided by it, the model computes what it did. With powers of two it does so to the bit, in
//! high precision. In FP8 the features that share a scale then differ less in size, so fewer of the small ones end below the smallest steps.

use crate::error::Result;
use candle_core::{D, DType, Tensor};

/// The parts of the features' differences in size that are tried: how much of it moves into the weights.
const PARTS: [f32; 4] = [0.25, 0.5, 0.75, 1.];

/// The largest exponent in either direction.
const LARGEST: f32 = 24.;

/// Exponents of powers of two to try for the features of an input, given the largest magnitudes of each feature in the inputs and in
/// the weights that they are multiplied with. Each list has an exponent for each feature: the input is to be multiplied by that power,
/// and the weights are to be divided by it. Lists of zeros are left out.
///
/// ```
/// use fp8_files::search::shifts_to_try;
/// let lists = shifts_to_try(&[1., 1., 4096.], &[0.1, 0.1, 0.1]);
/// assert!(lists.contains(&vec![0, 0, -12]));
/// ```
pub fn shifts_to_try(inputs: &[f32], weights: &[f32]) -> Vec<Vec<i8>> {
    let log = |x: &f32| Some(x.log2()).filter(|log| log.is_finite());
    let sizes = inputs.iter().zip(weights);
    let sizes: Vec<Option<(f32, f32)>> = sizes.map(|(x, w)| Some((log(x)?, log(w)?))).collect();
    let mut lists: Vec<Vec<i8>> = vec![];
    for part in PARTS {
        let wanted = |(x, w): (f32, f32)| (1. - part) * w - part * x;
        let mut known: Vec<f32> = sizes.iter().flatten().map(|size| wanted(*size)).collect();
        let middle = known.len() / 2;
        if known.is_empty() {
            break;
        }
        // Scales take what all have in common.
        let common = *known.select_nth_unstable_by(middle, f32::total_cmp).1;
        let exponent = |size: Option<(f32, f32)>| {
            let exponent = size.map_or(0., |size| (wanted(size) - common).round());
            exponent.clamp(-LARGEST, LARGEST) as i8
        };
        let list: Vec<i8> = sizes.iter().map(|size| exponent(*size)).collect();
        if list.iter().any(|e| *e != 0) && !lists.contains(&list) {
            lists.push(list);
        }
    }
    lists
}

/// `x` with its last dimension multiplied by these powers of two, in its own dtype.
///
/// # Errors
/// If there are more or fewer exponents than features.
pub fn shifted(x: &Tensor, exponents: &[i8]) -> Result<Tensor> {
    let wide = match x.dtype() {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let powers = exponents.iter().map(|e| f32::from(*e).exp2());
    let powers = Tensor::from_iter(powers, x.device())?.to_dtype(wide)?;
    let product = x.to_dtype(wide)?.broadcast_mul(&powers)?;
    Ok(product.to_dtype(x.dtype())?)
}

/// The inverse of these powers.
pub fn inverse_shift(exponents: &[i8]) -> Vec<i8> {
    exponents.iter().map(|e| -e).collect()
}

/// Whether `x`, kept in `dtype`, loses nothing when its last dimension is multiplied by these powers.
///
/// # Errors
/// As [`shifted`].
pub fn shifts_exactly(x: &Tensor, exponents: &[i8], dtype: DType) -> Result<bool> {
    let kept = x.to_dtype(dtype)?;
    let back = shifted(&shifted(&kept, exponents)?, &inverse_shift(exponents))?;
    let difference = (back.to_dtype(DType::F64)? - kept.to_dtype(DType::F64)?)?;
    let largest = difference.abs()?.flatten(0, D::Minus1)?.max(0)?;
    // NaN where Inf came about.
    Ok(largest.to_scalar::<f64>()? == 0.)
}
