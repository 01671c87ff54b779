//! Softmax and its gradient for one query, over the keys that it sees.

use crate::data::attention::Dropout;
use crate::ops::math::{Real, max, sum, sum2};
use crate::simd::simd;

/// Dot products become `exp(scale * x - largest)`. Returns the largest, and the sum of the results.
pub(super) fn exponentials(row: &mut [f32], scale: f32) -> (f32, f32) {
    simd(
        #[inline(always)]
        || {
            let largest = max(row, |x| x * scale);
            for x in row.iter_mut() {
                *x = Real::exp(*x * scale - largest);
            }
            (largest, sum(row, |x| x))
        },
    )
}

/// Dot products become probabilities, from the log-sum-exp. Returns the sum of the probabilities times `gradients`, after
/// these are multiplied by the `factors` of dropout, if any.
pub(super) fn probabilities(
    row: &mut [f32],
    scale: f32,
    lse: f32,
    gradients: &mut [f32],
    factors: &[f32],
) -> f32 {
    simd(
        #[inline(always)]
        || {
            for x in row.iter_mut() {
                *x = Real::exp(*x * scale - lse);
            }
            drop_out(gradients, factors);
            sum2(row, gradients, |p, dp| p * dp)
        },
    )
}

/// `gradients` of probabilities become those of dot products, but for the scale, and `row` the probabilities after dropout.
pub(super) fn differences(row: &mut [f32], delta: f32, gradients: &mut [f32], factors: &[f32]) {
    simd(
        #[inline(always)]
        || {
            for (dp, &p) in gradients.iter_mut().zip(row.iter()) {
                *dp = p * (*dp - delta);
            }
            drop_out(row, factors);
        },
    );
}

/// The factors of the keys from `first` on.
pub(super) fn factors(dropout: &Dropout, at: [usize; 2], first: usize, factors: &mut [f32]) {
    simd(
        #[inline(always)]
        || dropout.factors(at[0], at[1], first, factors),
    );
}

/// Multiplies by `factors`, if there are any; what is dropped may be Inf or NaN.
#[inline(always)]
pub(super) fn drop_out(row: &mut [f32], factors: &[f32]) {
    for (x, &factor) in row.iter_mut().zip(factors) {
        *x = if factor > 0.0 { *x * factor } else { 0.0 };
    }
}
