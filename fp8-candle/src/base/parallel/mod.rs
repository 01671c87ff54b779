//! Parallel loops, which every operation of this crate on the CPU uses.
//!
//! The number of threads is that of the caller's rayon pool, or else of the global one (`RAYON_NUM_THREADS`). The threads are
//! the caller and helpers of this crate, which stay awake for a moment after each loop: rayon's workers sleep at once, and
//! wake up too late for loops of some 100 us. A loop within a loop runs on its thread alone.
//!
//! Called on a worker of a rayon pool, tasks must not use rayon, as candle's products, sorts and more do: a helper is no worker, so it
//! waits for one, and each of them may be waiting for a helper.

pub use crate::base::simd::simd as vectorized;

mod pace;
mod pool;
pub(crate) mod shared;
pub(crate) mod tasks;

use crate::base::sync::lock;
use std::sync::{Mutex, PoisonError};

/// Calls `task` with every item, in no order, on as many threads as the caller's rayon pool has. If the caller is a worker of it, a task
/// that uses rayon, as candle's products do, may wait forever: see the [module](self).
///
/// # Panics
/// If a task does.
///
/// # Examples
/// ```
/// let mut squares = vec![0usize; 1000];
/// fp8_candle::parallel::for_each(squares.chunks_mut(100).enumerate(), |(chunk, squares)| {
///     for (i, square) in squares.iter_mut().enumerate() {
///         *square = (chunk * 100 + i).pow(2);
///     }
/// });
/// assert_eq!(squares[999], 998_001);
/// ```
pub fn for_each<I: Send>(items: impl IntoIterator<Item = I>, task: impl Fn(I) + Sync) {
    map(items, task);
}

/// The results of `task` for all items, in the order of the items. As in [`for_each`], tasks must not use rayon on a worker of it.
///
/// # Panics
/// If a task does.
///
/// # Examples
/// ```
/// let x: Vec<f64> = (0..1000).map(f64::from).collect();
/// let sums = fp8_candle::parallel::map(x.chunks(100), |x| x.iter().sum::<f64>());
/// assert_eq!(sums.len(), 10);
/// assert_eq!(sums.iter().sum::<f64>(), 499_500.);
/// ```
pub fn map<I: Send, Out: Send>(
    items: impl IntoIterator<Item = I>,
    task: impl Fn(I) -> Out + Sync,
) -> Vec<Out> {
    enum Slot<I, Out> {
        Item(I),
        Taken,
        Out(Out),
    }
    let mut items = items.into_iter();
    let (Some(first), second) = (items.next(), items.next()) else {
        return Vec::new();
    };
    let Some(second) = second else {
        return vec![task(first)];
    };
    // Loops instead of adaptors: all of this is compiled for each task.
    let mut slots = vec![
        Mutex::new(Slot::Item(first)),
        Mutex::new(Slot::Item(second)),
    ];
    for item in items {
        slots.push(Mutex::new(Slot::Item(item)));
    }
    tasks::for_each(slots.len(), |index| {
        let mut slot = lock(&slots[index]);
        if let Slot::Item(item) = std::mem::replace(&mut *slot, Slot::Taken) {
            *slot = Slot::Out(task(item));
        }
    });
    let mut out = Vec::with_capacity(slots.len());
    for slot in slots {
        match slot.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Slot::Out(result) => out.push(result),
            // A loop that has returned has run every task.
            Slot::Item(_) | Slot::Taken => {}
        }
    }
    out
}
