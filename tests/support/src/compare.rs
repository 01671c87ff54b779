//! Comparisons of tensors and of texts.

use crate::{bits, flat, flat64};
use candle_core::Tensor;

/// Same dtype, shape and bits, or a panic that names the case and the first difference.
#[track_caller]
pub fn assert_same(case: &str, got: &Tensor, expected: &Tensor) {
    assert_eq!(
        (got.dtype(), got.dims()),
        (expected.dtype(), expected.dims()),
        "{case}: dtype and shape"
    );
    let (got, expected) = (flat(got), flat(expected));
    for (i, (g, e)) in got.iter().zip(&expected).enumerate() {
        assert_eq!(
            g.to_bits(),
            e.to_bits(),
            "{case}: element {i}: got {g}, expected {e}"
        );
    }
}

/// The opposite of [`assert_same`], for the same shapes.
#[track_caller]
pub fn assert_differ(case: &str, got: &Tensor, other: &Tensor) {
    assert_eq!(got.dims(), other.dims(), "{case}: shape");
    assert_ne!(bits(got), bits(other), "{case}: the same bits");
}

/// Every element within `tolerance` of the largest expected magnitude; gives the largest deviation so measured.
#[track_caller]
pub fn assert_close(case: &str, got: &Tensor, expected: &Tensor, tolerance: f32) -> f32 {
    assert_eq!(got.dims(), expected.dims(), "{case}: shape");
    let (got, expected) = (flat(got), flat(expected));
    let largest = expected.iter().fold(0f32, |max, x| max.max(x.abs()));
    let mut worst = 0f32;
    for (i, (g, e)) in got.iter().zip(&expected).enumerate() {
        let deviation = (g - e).abs() / largest;
        assert!(
            deviation <= tolerance,
            "{case}: element {i}: got {g}, expected {e}"
        );
        worst = worst.max(deviation);
    }
    worst
}

/// Fails unless the two tensors have one dtype and shape and the same bits (any NaN equals any other).
#[track_caller]
pub fn assert_same_bits(what: &str, ours: &Tensor, theirs: &Tensor) {
    assert_eq!(ours.dtype(), theirs.dtype(), "dtype of {what}");
    assert_eq!(ours.dims(), theirs.dims(), "shape of {what}");
    for (at, (ours, theirs)) in flat64(ours).into_iter().zip(flat64(theirs)).enumerate() {
        assert!(
            ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
            "{what} at {at}: {ours:e}, expected {theirs:e}"
        );
    }
}

/// Fails unless each element is within `bound(index, expected)` of the expected one. NaN equals NaN only, an infinity
/// the same infinity only.
#[track_caller]
pub fn assert_within(
    what: &str,
    ours: &Tensor,
    theirs: &Tensor,
    bound: impl Fn(usize, f64) -> f64,
) {
    assert_eq!(ours.dtype(), theirs.dtype(), "dtype of {what}");
    assert_eq!(ours.dims(), theirs.dims(), "shape of {what}");
    for (at, (ours, theirs)) in flat64(ours).into_iter().zip(flat64(theirs)).enumerate() {
        let close = if theirs.is_finite() {
            (ours - theirs).abs() <= bound(at, theirs)
        } else {
            ours == theirs || ours.is_nan() && theirs.is_nan()
        };
        assert!(
            close,
            "{what} at {at}: {ours:e}, expected {theirs:e} +- {:e}",
            bound(at, theirs)
        );
    }
}

/// Signal to quantization noise in dB.
pub fn sqnr(reference: &Tensor, x: &Tensor) -> f64 {
    assert_eq!(reference.dims(), x.dims());
    let (reference, x) = (flat64(reference), flat64(x));
    let signal: f64 = reference.iter().map(|r| r * r).sum();
    let noise: f64 = reference.iter().zip(&x).map(|(r, x)| (r - x).powi(2)).sum();
    10. * (signal / noise).log10()
}

/// The text of the error, which must contain every part.
#[track_caller]
pub fn assert_text<E: std::fmt::Display>(case: &str, error: E, parts: &[&str]) -> String {
    let text = error.to_string();
    for part in parts {
        assert!(
            text.contains(part),
            "{case}: `{part}` is not in the message: {text}"
        );
    }
    text
}
