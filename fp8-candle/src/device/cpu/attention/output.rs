//! Rows of results.

use crate::base::data::attention::Attention;
use crate::base::parallel::shared::Shared;
use crate::base::simd::simd;
use fp8_core::HighPrecision;
use std::mem::MaybeUninit;

/// A contiguous result whose rows are written by different tasks.
pub(super) struct Output<'a, T> {
    values: Shared<'a, MaybeUninit<T>>,
    strides: [usize; 3],
    features: usize,
}

impl<T> Clone for Output<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Output<'_, T> {}

impl<T: HighPrecision> Output<'_, T> {
    /// Writes `factor * row`, rounded once, or zeros if `row` is empty. Negative zeros become positive: which of both a sum of
    /// zeros is may depend on terms of 0 that hidden keys add.
    ///
    /// # Safety
    /// No other task may write this row.
    pub(super) unsafe fn write(&self, at: [usize; 3], row: &[f32], factor: f32) {
        let start: usize = at.iter().zip(self.strides).map(|(at, by)| at * by).sum();
        // SAFETY: the rows are disjoint; the caller guarantees the rest.
        let to = unsafe { self.values.part(start..start + self.features) };
        if row.is_empty() {
            to.fill(MaybeUninit::new(T::from_f32(0.0)));
            return;
        }
        simd(
            #[inline(always)]
            || {
                for (to, &x) in to.iter_mut().zip(row) {
                    to.write(T::from_f32(x * factor + 0.0));
                }
            },
        );
    }
}

/// Elements of a result with this many heads and tokens.
pub(super) fn len(attention: &Attention, [heads, tokens]: [usize; 2]) -> usize {
    attention.batch * heads * tokens * attention.head_dim
}

impl<'a, T> Output<'a, T> {
    /// The spare capacity of `values`, which has room for this many heads and tokens.
    pub(super) fn of(
        values: &'a mut Vec<T>,
        attention: &Attention,
        [heads, tokens]: [usize; 2],
    ) -> Self {
        let features = attention.head_dim;
        let strides = match attention.tokens_first {
            true => [heads * tokens * features, features, heads * features],
            false => [heads * tokens * features, tokens * features, features],
        };
        let len = len(attention, [heads, tokens]);
        Self {
            values: Shared::new(&mut values.spare_capacity_mut()[..len]),
            strides,
            features,
        }
    }
}
