//! The codes of a layer: those of its source, those of a search, or rounded ones.

use super::slabs::{self, Distance};
use super::source::Source;
use crate::contents::Described;
use crate::error::{Error, Result};
use crate::names::weight_name;
use fp8_candle::Fp8Tensor;
use fp8_core::Format;

/// The codes and scales of a layer whose weight is the tensor `name`, and their distance to it if the source has other codes, which are rounded
/// a second time. Codes that the source has in the scheme's granularity are kept, since rounding their values could change a scale by a
/// rounding of f32, and with it codes.
pub(super) fn codes_of(
    source: &dyn Source,
    layer: &Described,
    name: &str,
    chosen: Option<&Fp8Tensor>,
    slab: usize,
) -> Result<(Fp8Tensor, Option<Distance>)> {
    let codes = match chosen {
        Some(codes) => fitting(codes, layer)?,
        None => match source.codes(name, layer.scheme.weight)? {
            Some(codes) => return Ok((codes, None)),
            None => slabs::quantize(source, layer, name, slab)?,
        },
    };
    let distance = match source.is_fp8(name) {
        true => Some(slabs::distance(source, name, &codes, slab)?),
        false => None,
    };
    Ok((codes, distance))
}

/// The codes that a search has found for a layer.
fn fitting(codes: &Fp8Tensor, layer: &Described) -> Result<Fp8Tensor> {
    let (n, k) = layer.sizes;
    let (got, wanted) = (codes.granularity(), layer.scheme.weight);
    if codes.dims() != [n, k] || got != wanted || codes.format() != Format::E4M3 {
        return Err(Error::TensorShape {
            tensor: weight_name(&layer.path),
            got: codes.dims().to_vec(),
            expected: format!(
                "codes of [{n}, {k}] in e4m3 with {wanted} scales, not in {} with {got} ones",
                codes.format()
            ),
        });
    }
    Ok(codes.clone())
}
