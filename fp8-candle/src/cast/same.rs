//! When two casts give the same codes.

use crate::cast::quantize::Quantizer;
use crate::cast::scale_source::ScaleSource;

/// Whether the codes made by `first` are what `second` would make for the other contraction.
pub(crate) fn serves_both(first: &Quantizer, second: &Quantizer) -> bool {
    first.is_symmetric() && same_cast(first, second)
}

/// The same format, granularity and source of scales.
pub(crate) fn same_cast(a: &Quantizer, b: &Quantizer) -> bool {
    let same_source = match (&a.source, &b.source) {
        (
            ScaleSource::Current {
                policy: a,
                power_of_two: a2,
            },
            ScaleSource::Current {
                policy: b,
                power_of_two: b2,
            },
        ) => a == b && a2 == b2,
        (ScaleSource::Delayed { slot: a, .. }, ScaleSource::Delayed { slot: b, .. })
        | (ScaleSource::Static(a), ScaleSource::Static(b)) => a.is(b),
        (ScaleSource::Fixed { dequant_scale: a }, ScaleSource::Fixed { dequant_scale: b }) => {
            a.id() == b.id()
        }
        (ScaleSource::Unscaled, ScaleSource::Unscaled) => true,
        _ => false,
    };
    let same_bits = match (&a.stochastic, &b.stochastic) {
        (None, None) => true,
        (Some(a), Some(b)) => a.is(b),
        _ => false,
    };
    same_source && same_bits && a.cast == b.cast && a.granularity == b.granularity
}
