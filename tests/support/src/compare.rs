//! Comparisons of tensors and of texts.

use crate::{bits, flat64};
use candle_core::Tensor;

/// The dtypes, shapes and bits are the same. Any NaN equals any other.
#[track_caller]
pub fn assert_same(case: &str, got: &Tensor, expected: &Tensor) {
    assert_eq!(got.dtype(), expected.dtype(), "{case}: dtype");
    assert_eq!(got.dims(), expected.dims(), "{case}: shape");
    for (at, (got, expected)) in flat64(got).into_iter().zip(flat64(expected)).enumerate() {
        assert!(
            got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan(),
            "{case}: element {at}: got {got:e}, expected {expected:e}"
        );
    }
}

/// The shapes are the same, but not the bits.
#[track_caller]
pub fn assert_differ(case: &str, got: &Tensor, other: &Tensor) {
    assert_eq!(got.dims(), other.dims(), "{case}: shape");
    assert_ne!(bits(got), bits(other), "{case}: the same bits");
}

/// Every element is within `tolerance` times the largest expected magnitude. Returns the largest deviation, in that unit.
#[track_caller]
pub fn assert_close(case: &str, got: &Tensor, expected: &Tensor, tolerance: f64) -> f64 {
    assert_eq!(got.dims(), expected.dims(), "{case}: shape");
    let (got, expected) = (flat64(got), flat64(expected));
    let largest = expected.iter().fold(0f64, |max, x| max.max(x.abs()));
    let mut worst = 0f64;
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

/// Every element is within `bound(index, expected)` of the expected one. NaN matches only NaN, and an infinity only itself.
#[track_caller]
pub fn assert_within(
    case: &str,
    got: &Tensor,
    expected: &Tensor,
    bound: impl Fn(usize, f64) -> f64,
) {
    assert_eq!(got.dtype(), expected.dtype(), "{case}: dtype");
    assert_eq!(got.dims(), expected.dims(), "{case}: shape");
    for (at, (got, expected)) in flat64(got).into_iter().zip(flat64(expected)).enumerate() {
        let close = if expected.is_finite() {
            (got - expected).abs() <= bound(at, expected)
        } else {
            got == expected || got.is_nan() && expected.is_nan()
        };
        assert!(
            close,
            "{case}: element {at}: got {got:e}, expected {expected:e} +- {:e}",
            bound(at, expected)
        );
    }
}

/// The largest difference of two elements: NaN, which is within no bound, if one of them is.
#[track_caller]
pub fn apart(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims());
    let pairs = flat64(a).into_iter().zip(flat64(b));
    largest_of(pairs.map(|(a, b)| (a - b).abs()))
}

/// The largest of these: NaN if one of them is, where `f64::max` would pass over it. 0 of none.
pub fn largest_of(values: impl IntoIterator<Item = f64>) -> f64 {
    let larger = |max: f64, x: f64| match max.is_nan() || x <= max {
        true => max,
        false => x,
    };
    values.into_iter().fold(0., larger)
}

/// Signal to quantization noise in dB.
pub fn sqnr(reference: &Tensor, x: &Tensor) -> f64 {
    assert_eq!(reference.dims(), x.dims());
    let (reference, x) = (flat64(reference), flat64(x));
    let signal: f64 = reference.iter().map(|r| r * r).sum();
    let noise: f64 = reference.iter().zip(&x).map(|(r, x)| (r - x).powi(2)).sum();
    10. * (signal / noise).log10()
}

/// The message of the error contains every part. Returns the message.
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

/// Fails unless the two differ as little as if few values that lie between two codes went to the other one: 30 dB.
///
/// For scales of inputs that are not powers of two: a file is served with `1 / (amax / MAX)`, as every engine does, and
/// trained with `MAX / amax`, which may be an ulp away.
#[track_caller]
pub fn assert_served(case: &str, got: &Tensor, expected: &Tensor) {
    assert_eq!(got.dims(), expected.dims(), "{case}");
    let (got, expected) = (flat64(got), flat64(expected));
    let squares = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>();
    let error = squares(&mut got.iter().zip(&expected).map(|(a, b)| a - b));
    let signal = squares(&mut expected.iter().copied());
    assert!(
        error <= signal * 1e-3,
        "{case}: {} dB",
        10. * (signal / error).log10()
    );
}
