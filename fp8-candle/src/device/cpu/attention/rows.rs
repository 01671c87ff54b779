//! Softmax and its gradient for one query.
//!
//! Rows are whole chunks of 32 keys, without a remainder, which would cost as much as several chunks. Some of the first and of
//! the last keys may be hidden.

use super::cast::{RowCast, amax};
use super::layout::PANEL;
use crate::base::data::attention::Dropout;
use crate::base::math::{Real, max, sum, sum2};
use crate::base::simd::simd;
use std::ops::Range;

/// A row of scores, of which some are visible.
pub(super) struct Row<'a> {
    pub(super) values: &'a mut [f32],
    pub(super) visible: Range<usize>,
}

impl<'a> Row<'a> {
    /// The chunks of `values` in which keys are visible; the others become 0.
    pub(super) fn of(values: &'a mut [f32], visible: &Range<usize>) -> Self {
        let start = visible.start / PANEL * PANEL;
        let end = visible.end.next_multiple_of(PANEL).max(start);
        values[..start].fill(0.0);
        values[end..].fill(0.0);
        let mut row = Self {
            values: &mut values[start..end],
            visible: visible.start - start..visible.end - start,
        };
        if row.visible.is_empty() {
            row.fill(0.0);
        }
        row
    }

    /// Sets hidden scores to `value`.
    fn fill(&mut self, value: f32) {
        self.values[..self.visible.start].fill(value);
        self.values[self.visible.end..].fill(value);
    }

    /// Turns dot products `x` into `exp(scale * x - less)` and returns `less` of the row.
    #[inline(always)]
    fn exp(&mut self, scale: f32, less: impl Fn(&[f32]) -> f32) -> f32 {
        // Hidden scores may be NaN, or become it; a visible one is harmless.
        self.fill(self.values[self.visible.start]);
        let less = less(self.values);
        for chunk in self.values.as_chunks_mut::<PANEL>().0 {
            for x in chunk {
                *x = Real::exp(*x * scale - less);
            }
        }
        self.fill(0.0);
        less
    }

    /// Turns dot products `x` into `exp(scale * x - largest)`, then drops out by `factors`. Returns the largest, and the sum
    /// before dropout. At least one key is visible.
    ///
    /// With a cast they become the values of the codes of the probabilities instead, which are `exp(..)` over the sum.
    pub(super) fn exponentials(
        &mut self,
        scale: f32,
        factors: &[f32],
        cast: Option<RowCast>,
    ) -> (f32, f32) {
        simd(
            #[inline(always)]
            || {
                let largest = self.exp(scale, |row| max(row, |x| x * scale));
                let total = sum(self.values, |x| x);
                drop_out(self.values, factors);
                if let Some(cast) = cast {
                    // The largest exponential is 1, unless it is dropped. Products with a positive factor have the order of the values.
                    let factor = total.recip();
                    let amax = match factors.is_empty() {
                        true => factor,
                        false => amax(self.values) * factor,
                    };
                    cast.apply(self.values, factor, amax);
                }
                (largest, total)
            },
        )
    }

    /// Turns dot products into probabilities after dropout, by the log-sum-exp (`None`: by that of these dot products), and `gradients`
    /// of these into gradients of the dot products, without the scale. At least one key is visible.
    ///
    /// With casts, both become the values of their codes.
    pub(super) fn gradients(
        &mut self,
        scale: f32,
        lse: Option<f32>,
        gradients: &mut Row<'_>,
        factors: &[f32],
        casts: Option<[RowCast; 2]>,
    ) {
        simd(
            #[inline(always)]
            || {
                match lse {
                    Some(lse) => {
                        self.exp(scale, |_| lse);
                    }
                    None => {
                        self.exp(scale, |row| max(row, |x| x * scale));
                        let total = sum(self.values, |x| x);
                        for p in &mut *self.values {
                            *p /= total;
                        }
                    }
                }
                gradients.fill(0.0);
                drop_out(gradients.values, factors);
                let delta = sum2(self.values, gradients.values, |p, dp| p * dp);
                for (dp, &p) in gradients.values.iter_mut().zip(&*self.values) {
                    *dp = p * (*dp - delta);
                }
                // Zero times NaN is not 0.
                gradients.fill(0.0);
                drop_out(self.values, factors);
                if let Some([cast, grad_cast]) = casts {
                    cast.apply(self.values, 1.0, amax(self.values));
                    grad_cast.apply(gradients.values, 1.0, amax(gradients.values));
                }
            },
        );
    }
}

/// The factors of the keys from `first` on, as many as `factors` has; none without dropout.
pub(super) fn factors<'a>(
    dropout: Option<&Dropout>,
    at: [usize; 2],
    first: usize,
    factors: &'a mut [f32],
) -> &'a [f32] {
    let Some(dropout) = dropout else { return &[] };
    simd(
        #[inline(always)]
        || dropout.factors(at[0], at[1], first, factors),
    );
    factors
}

/// Multiplies by `factors`, if there are any; dropped values may be Inf or NaN.
#[inline(always)]
fn drop_out(row: &mut [f32], factors: &[f32]) {
    for (x, &factor) in row.iter_mut().zip(factors) {
        *x = if factor > 0.0 { *x * factor } else { 0.0 };
    }
}
