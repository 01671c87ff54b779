//! Buffers that products reuse: new memory would cost a page fault for every 4 KiB.

use crate::base::sync::lock;
use half::{bf16, f16};
use std::cell::RefCell;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard};

/// One cache line, for the alignment.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; LINE]);

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

/// All threads share buffers of at least this many bytes.
const LARGE: usize = 2 << 20;

/// The most bytes kept by each thread, and for all of them together.
const KEPT: usize = 8 << 20;
const KEPT_FOR_ALL: usize = 128 << 20;

/// A type for which any bytes are a valid value.
pub(crate) trait Plain: Copy {}
impl Plain for u16 {}
impl Plain for bf16 {}
impl Plain for f16 {}
impl Plain for f32 {}
impl Plain for f64 {}

/// Unused buffers, the smallest first.
struct Pool(Vec<Vec<Line>>);

thread_local! {
    static OWN: RefCell<Pool> = const { RefCell::new(Pool(Vec::new())) };
}

static SHARED: Mutex<Pool> = Mutex::new(Pool(Vec::new()));

fn shared() -> MutexGuard<'static, Pool> {
    lock(&SHARED)
}

impl Pool {
    /// The smallest buffer that is large enough, or else the largest, to be grown.
    fn take(&mut self, needed: usize) -> Vec<Line> {
        let at = self
            .0
            .iter()
            .position(|lines| lines.len() >= needed)
            .or_else(|| self.0.len().checked_sub(1));
        at.map_or_else(Vec::new, |at| self.0.remove(at))
    }

    fn give(&mut self, lines: Vec<Line>, most: usize) {
        let kept: usize = self.0.iter().map(|lines| lines.len() * LINE).sum();
        if kept + lines.len() * LINE <= most {
            let at = self.0.partition_point(|other| other.len() < lines.len());
            self.0.insert(at, lines);
        }
    }
}

/// Elements aligned to a cache line, with arbitrary values; returned to a pool when dropped.
pub(crate) struct Scratch<T> {
    lines: Vec<Line>,
    len: usize,
    element: std::marker::PhantomData<T>,
}

impl<T: Plain> Scratch<T> {
    pub(crate) fn new(len: usize) -> Self {
        let needed = (len * size_of::<T>()).div_ceil(LINE);
        let mut lines = if needed * LINE >= LARGE {
            shared().take(needed)
        } else {
            OWN.with_borrow_mut(|pool| pool.take(needed))
        };
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
        if lines.len() * LINE >= LARGE {
            shared().give(lines, KEPT_FOR_ALL);
        } else {
            // At the end of a thread the pool is gone and the memory is simply freed.
            let _ = OWN.try_with(|pool| pool.borrow_mut().give(lines, KEPT));
        }
    }
}

impl<T: Plain> Deref for Scratch<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the lines are initialized, hold at least `len` elements, are aligned to more than any `Plain` type
        // needs, and any bytes are a valid value of one.
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
        let large = || Scratch::<f32>::new(LARGE);
        let (first, second) = (large(), large());
        assert_ne!(first.as_ptr(), second.as_ptr());
        assert_eq!((first.len(), second.len()), (LARGE, LARGE));
    }
}
