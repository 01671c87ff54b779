//! A slice whose parts are written by different tasks.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use std::any::TypeId;
use std::marker::PhantomData;
use std::ops::Range;

/// An exclusively borrowed slice whose parts may be written by several tasks.
pub(crate) struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

impl<T> Clone for Shared<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Shared<'_, T> {}

// SAFETY: it stands for the `&mut [T]` it was made from; callers of `part` guarantee that parts are disjoint.
unsafe impl<T: Send> Send for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            slice: PhantomData,
        }
    }

    /// This slice, if its elements are of type `U`.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub(crate) fn of_type<U: 'static>(self) -> Option<Shared<'a, U>>
    where
        T: 'static,
    {
        (TypeId::of::<T>() == TypeId::of::<U>()).then_some(Shared {
            start: self.start.cast(),
            len: self.len,
            slice: PhantomData,
        })
    }

    /// Where the slice begins.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub(crate) fn address(&self) -> *const T {
        self.start
    }

    /// # Safety
    /// Parts that are borrowed at the same time must not overlap.
    ///
    /// # Panics
    /// If the part does not lie within the slice.
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: within the slice by the assertion; the caller guarantees that no other part overlaps it.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
