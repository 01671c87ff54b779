//! An allocator that counts, for tests and benchmarks of what is held in memory.
//!
//! Counts are those of the whole process: a test program that uses them runs one test at a time.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering};

static HELD: AtomicIsize = AtomicIsize::new(0);
static MOST: AtomicIsize = AtomicIsize::new(0);
static LARGEST: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, which counts blocks of at least `LEAST` bytes: `#[global_allocator]` of a program that calls the functions below.
#[derive(Debug)]
pub struct Counting<const LEAST: usize = 0>;

impl<const LEAST: usize> Counting<LEAST> {
    fn add(size: usize) {
        if size >= LEAST {
            let held = HELD.fetch_add(size as isize, Ordering::Relaxed) + size as isize;
            MOST.fetch_max(held, Ordering::Relaxed);
            LARGEST.fetch_max(size, Ordering::Relaxed);
        }
    }

    fn remove(size: usize) {
        if size >= LEAST {
            HELD.fetch_sub(size as isize, Ordering::Relaxed);
        }
    }
}

// SAFETY: each method is the system allocator's with the same arguments; counting touches no memory of theirs.
unsafe impl<const LEAST: usize> GlobalAlloc for Counting<LEAST> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::add(layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::add(layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Self::remove(layout.size());
        Self::add(size);
        // SAFETY: as the caller promises.
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        Self::remove(layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(block, layout) }
    }
}

/// Bytes that are allocated at present.
pub fn held() -> isize {
    HELD.load(Ordering::Relaxed)
}

/// What `f` returns, and the most bytes that were allocated at a time while it ran, beyond those before.
pub fn peak<T>(f: impl FnOnce() -> T) -> (T, isize) {
    let before = held();
    MOST.store(before, Ordering::Relaxed);
    let result = f();
    (result, MOST.load(Ordering::Relaxed) - before)
}

/// What `f` returns, and the size of the largest block that was allocated while it ran.
pub fn largest<T>(f: impl FnOnce() -> T) -> (T, usize) {
    LARGEST.store(0, Ordering::Relaxed);
    let result = f();
    (result, LARGEST.load(Ordering::Relaxed))
}
