//! Prefetches of addresses that need not be valid: they read nothing and cannot fail.

use super::super::scratch::LINE;
pub(super) use fp8_core::prefetch_line as near;

/// Into the first-level cache, to be written.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) fn to_write<T>(address: *const T) {
    use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
    // SAFETY: every x86-64 processor has the instruction or ignores it, and it cannot fail.
    unsafe { _mm_prefetch::<_MM_HINT_ET0>(address.cast()) };
}

/// Into the first-level cache.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
pub(super) fn to_write<T>(address: *const T) {
    near(address);
}

/// Values that later tiles read. A tile fetches a part of them with every step of its sum, or every few: many prefetches in a row would
/// wait for each other, and the tile for them.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    start: [*const u8; 2],
    bytes_of_part: [usize; 2],
}

impl Ahead {
    /// Fetches both in so many parts. Where there is nothing to fetch, [`Ahead::fetch_line`] repeats an address of `near`, which are in
    /// the cache.
    pub(super) fn new<V>(values: [&[V]; 2], parts: usize, near: &[V]) -> Self {
        let start = |values: &[V]| match values {
            [] => near.as_ptr().cast(),
            values => values.as_ptr().cast(),
        };
        Self {
            start: values.map(start),
            bytes_of_part: values.map(|values| size_of_val(values).div_ceil(parts)),
        }
    }

    /// Fetches the first line of part `part`, which is all of it if there are many parts.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn fetch_line(self, part: usize) {
        for (start, bytes) in self.start.into_iter().zip(self.bytes_of_part) {
            near(start.wrapping_add(part * bytes));
        }
    }

    /// Fetches part `part`.
    #[inline(always)]
    pub(super) fn fetch(self, part: usize) {
        for (start, bytes) in self.start.into_iter().zip(self.bytes_of_part) {
            let start = start.wrapping_add(part * bytes);
            let mut line = 0;
            while line < bytes {
                near(start.wrapping_add(line));
                line += LINE;
            }
        }
    }
}
