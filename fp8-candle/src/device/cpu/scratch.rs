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

/// A buffer of up to this many bytes may serve for any smaller size.
const SMALL: usize = 1 << 16;

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

/// Unused buffers, the smallest first, each with the time at which it was given back.
struct Pool {
    buffers: Vec<(Vec<Line>, u64)>,
    time: u64,
}

thread_local! {
    static OWN: RefCell<Pool> = const { RefCell::new(Pool::new()) };
}

static SHARED: Mutex<Pool> = Mutex::new(Pool::new());

fn shared() -> MutexGuard<'static, Pool> {
    lock(&SHARED)
}

impl Pool {
    const fn new() -> Self {
        Self {
            buffers: Vec::new(),
            time: 0,
        }
    }

    /// The smallest buffer that is large enough; an empty one if there is none, or if it is many times too large and others will need it.
    fn take(&mut self, needed: usize) -> Vec<Line> {
        let most = (8 * needed).max(SMALL / LINE);
        let at = self
            .buffers
            .partition_point(|(lines, _)| lines.len() < needed);
        match self.buffers.get(at) {
            Some((lines, _)) if lines.len() <= most => self.buffers.remove(at).0,
            _ => Vec::new(),
        }
    }

    /// Keeps this buffer, and drops those that have been unused for longest while there are more than `most` bytes.
    fn give(&mut self, lines: Vec<Line>, most: usize) {
        self.time += 1;
        let bytes = |lines: &Vec<Line>| lines.len() * LINE;
        let mut kept = bytes(&lines);
        kept += self
            .buffers
            .iter()
            .map(|(lines, _)| bytes(lines))
            .sum::<usize>();
        let at = self
            .buffers
            .partition_point(|(other, _)| other.len() < lines.len());
        self.buffers.insert(at, (lines, self.time));
        while kept > most {
            let oldest = (0..self.buffers.len()).min_by_key(|&at| self.buffers[at].1);
            let Some(oldest) = oldest else { break };
            kept -= bytes(&self.buffers.remove(oldest).0);
        }
    }
}

/// Lines of a new buffer that has to have `needed`: up to a quarter more, so that sizes that grow a little do not need a new one each time.
fn rounded_up(needed: usize) -> usize {
    let lines = needed.next_multiple_of((needed.next_power_of_two() / 8).max(1));
    match needed * LINE < LARGE {
        // Given back to the pool that it is taken from.
        true => lines.min(LARGE / LINE - 1),
        false => lines,
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
            lines = vec![Line([0; LINE]); rounded_up(needed)];
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

    #[test]
    fn new_buffers_have_room_for_a_little_more() {
        for needed in (0..5000).chain([LARGE / LINE - 1, LARGE / LINE, 3 * LARGE / LINE + 1]) {
            let lines = rounded_up(needed);
            assert!((needed..=needed + needed / 4).contains(&lines), "{needed}");
            assert_eq!(lines * LINE < LARGE, needed * LINE < LARGE, "{needed}");
        }
        let large = Scratch::<u16>::new(100_000);
        let address = large.as_ptr();
        drop(large);
        assert_eq!(Scratch::<u16>::new(101_000).as_ptr(), address);
    }

    #[test]
    fn buffers_that_are_used_stay() {
        let mut pool = Pool::new();
        let buffer = |kib: usize| vec![Line([0; LINE]); (kib << 10) / LINE];
        let kib = |lines: &[Line]| (lines.len() * LINE) >> 10;
        for size in [100, 900, 200] {
            pool.give(buffer(size), 1300 << 10);
        }
        // None is large enough, or the only one much too large.
        assert_eq!(kib(&pool.take(16 * 1000)), 0);
        assert_eq!(kib(&pool.take(4 * 16)), 0);
        let used = pool.take(16 * 90);
        assert_eq!(kib(&used), 100);
        pool.give(used, 1300 << 10);
        // The largest was not used for the longest time.
        pool.give(buffer(300), 1300 << 10);
        let sizes: Vec<usize> = pool.buffers.iter().map(|(lines, _)| kib(lines)).collect();
        assert_eq!(sizes, [100, 200, 300]);
        pool.give(buffer(1400), 1300 << 10);
        assert!(pool.buffers.is_empty());
    }
}
