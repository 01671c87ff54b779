//! Buffers that GEMMs use again: fresh memory would cost a page fault for every 4 KiB.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

/// One cache line, for the alignment.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; LINE]);

const LINE: usize = 64;

/// What a thread keeps at most, in bytes.
const KEPT: usize = 64 << 20;

/// A type that any bytes are a value of.
pub(super) trait Plain: Copy {}
impl Plain for u16 {}
impl Plain for f32 {}

thread_local! {
    static POOL: RefCell<Vec<Vec<Line>>> = const { RefCell::new(Vec::new()) };
}

/// Elements aligned to a cache line, with whatever they held last; returned to their thread's pool when dropped.
pub(super) struct Scratch<T> {
    lines: Vec<Line>,
    len: usize,
    element: std::marker::PhantomData<T>,
}

impl<T: Plain> Scratch<T> {
    pub(super) fn new(len: usize) -> Self {
        let needed = (len * size_of::<T>()).div_ceil(LINE);
        // The smallest that is large enough, else the largest, which grows.
        let mut lines = POOL.with_borrow_mut(|pool| {
            let at = pool
                .iter()
                .position(|lines| lines.len() >= needed)
                .or_else(|| pool.len().checked_sub(1));
            at.map_or_else(Vec::new, |at| pool.remove(at))
        });
        if lines.len() < needed {
            lines.clear();
            lines.resize(needed, Line([0; LINE]));
        }
        Self {
            lines,
            len,
            element: std::marker::PhantomData,
        }
    }
}

impl<T> Drop for Scratch<T> {
    fn drop(&mut self) {
        let lines = std::mem::take(&mut self.lines);
        // Without the pool, at the end of a thread, the memory is simply freed.
        let _ = POOL.try_with(|pool| {
            let mut pool = pool.borrow_mut();
            let kept: usize = pool.iter().map(|lines| lines.len() * LINE).sum();
            if kept + lines.len() * LINE <= KEPT {
                let at = pool.partition_point(|other| other.len() < lines.len());
                pool.insert(at, lines);
            }
        });
    }
}

impl<T: Plain> Deref for Scratch<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the lines are initialized, hold at least `len` elements, are aligned to more than any `Plain` type
        // needs, and any bytes are a value of one.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
}

impl<T: Plain> DerefMut for Scratch<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and the lines are borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_distinct_and_used_again() {
        let (mut a, mut b) = (Scratch::<f32>::new(100), Scratch::<u16>::new(1000));
        a.fill(1.);
        b.fill(7);
        assert!(a.iter().all(|&x| x == 1.) && a.len() == 100);
        assert_eq!(a.as_ptr() as usize % LINE, 0);
        let address = b.as_ptr() as usize;
        drop(b);
        let again = Scratch::<u16>::new(999);
        assert_eq!((again.as_ptr() as usize, again.len()), (address, 999));
        assert!(Scratch::<f32>::new(0).is_empty());
    }
}
