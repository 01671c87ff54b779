//! Prefetches of addresses that need not be valid: they read nothing and cannot fail.

pub(super) use fp8_core::prefetch_line as near;

/// Into the first-level cache, to be written.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) fn to_write<T>(address: *const T) {
    use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
    // SAFETY: every x86-64 processor has the instruction or ignores it, and it cannot fail.
    unsafe { _mm_prefetch::<_MM_HINT_ET0>(address.cast()) };
}

/// Values that later tiles read. A tile fetches a part of them with each step of its sum: many prefetches in a row would wait for
/// each other, and the tile for them.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    start: [*const u8; 2],
    bytes_per_step: [usize; 2],
}

impl Ahead {
    /// Fetches both in `steps` steps. Where there is nothing to fetch it repeats an address of `near`, which are in the cache.
    pub(super) fn new<V>(values: [&[V]; 2], steps: usize, near: &[V]) -> Self {
        let start = |values: &[V]| match values {
            [] => near.as_ptr().cast(),
            values => values.as_ptr().cast(),
        };
        Self {
            start: values.map(start),
            bytes_per_step: values.map(|values| size_of_val(values).div_ceil(steps)),
        }
    }

    /// Fetches the part of step `step`.
    #[inline(always)]
    pub(super) fn fetch(self, step: usize) {
        for (start, bytes) in self.start.into_iter().zip(self.bytes_per_step) {
            near(start.wrapping_add(step * bytes));
        }
    }
}
