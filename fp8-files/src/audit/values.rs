//! Tensors in high precision: small ones are finite, large ones do not hold FP8 codes.

use super::fault::Fault;
use super::report::Finding;
use crate::load::survey::{Survey, Tensor, numbers};
use fp8_core::{Cast, Format};
use safetensors::Dtype;

/// Elements of the largest tensor that is read as a whole: norms and biases have fewer.
const SMALL: usize = 1 << 16;
/// Elements that are read of a large one.
const SAMPLE: usize = 1 << 12;

const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::BF16, Dtype::F16];

/// Looks at the values of tensors in high precision.
pub(super) fn findings(survey: &Survey) -> Vec<Finding> {
    let mut found = vec![];
    for (_, tensor) in survey.values() {
        // Scales that no loader knows have their own findings.
        if Survey::is_scale_name(tensor.name) {
            continue;
        }
        match tensor.shape() {
            [_] if tensor.len() <= SMALL => found.extend(not_finite(tensor)),
            [_, _] => {
                if let Some(amax) = codes_without_scale(tensor) {
                    let text =
                        format!("values that are all FP8 codes, up to {amax}, without a scale");
                    let expected = "values times their scale";
                    found.push(Finding::new(
                        Fault::CodesAsValues,
                        tensor.name,
                        text,
                        expected,
                    ));
                }
            }
            _ => {}
        }
    }
    found
}

fn first(tensor: Tensor<'_>, count: usize) -> Option<Vec<f32>> {
    let dtype = tensor.dtype().filter(|dtype| FLOATS.contains(dtype))?;
    let bytes = tensor.bytes(0..count * dtype.bitsize() / 8).ok()?;
    numbers(dtype, &bytes)
}

fn not_finite(tensor: Tensor<'_>) -> Option<Finding> {
    let values = first(tensor, SMALL)?;
    let index = values.iter().position(|value| !value.is_finite())?;
    let found = format!("{} at index {index}", values[index]);
    Some(Finding::new(
        Fault::ValuesNotFinite,
        tensor.name,
        found,
        "finite values",
    ))
}

/// The largest magnitude of a matrix whose values are FP8 codes: all are E4M3 values, and the largest is near the top of the format, which
/// only codes are.
pub(super) fn codes_without_scale(tensor: Tensor<'_>) -> Option<f32> {
    const FULL: f32 = 224.;
    let values = first(tensor, SAMPLE)?;
    let cast = Cast::new(Format::E4M3);
    let is_code = |value: &f32| Format::E4M3.decode(cast.encode(*value, 0)) == *value;
    let amax = values
        .iter()
        .fold(0f32, |amax, value| amax.max(value.abs()));
    (amax >= FULL && values.iter().all(is_code)).then_some(amax)
}
