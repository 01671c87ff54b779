//! A slice that tasks write different parts of.

use std::marker::PhantomData;
use std::ops::Range;

/// An exclusively borrowed slice whose parts may be written by several tasks.
#[derive(Clone, Copy)]
pub(super) struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: it is no more than the `&mut [T]` it was made of; who takes parts answers for their being disjoint.
unsafe impl<T: Send> Send for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(super) fn new(slice: &'a mut [T]) -> Self {
        Self {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            slice: PhantomData,
        }
    }

    /// # Safety
    /// Parts that are borrowed at the same time must not overlap.
    ///
    /// # Panics
    /// Where the part does not lie within the slice.
    pub(super) unsafe fn part(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: within the slice by the assertion; the caller lets no other part of it overlap.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
