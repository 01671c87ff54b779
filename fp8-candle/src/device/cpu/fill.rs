//! New vectors, written by tasks.

use super::pages;
use std::mem::MaybeUninit;

/// A vector of `len` elements that `task(start, part)` writes in parts of `part_len`, and the results of the tasks, in order.
///
/// Parts are `zero` before. Each thread writes its own, into the cache that it then works in: a vector of zeros would be
/// written by the caller's thread alone, and read back from memory.
pub(crate) fn filled<T: Copy + Send + Sync, Out: Send>(
    zero: T,
    len: usize,
    part_len: usize,
    task: impl Fn(usize, &mut [T]) -> Out + Sync,
) -> (Vec<T>, Vec<Out>) {
    let mut values = pages::vec_for(len);
    let part_len = part_len.max(1);
    let parts = values.spare_capacity_mut()[..len].chunks_mut(part_len);
    let outs = crate::base::parallel::map(parts.enumerate(), |(index, part)| {
        task(index * part_len, zeros(zero, part))
    });
    // SAFETY: every part has been written. After a panic this place is not reached.
    unsafe { values.set_len(len) };
    (values, outs)
}

/// `room`, filled with `zero`.
pub(super) fn zeros<T: Copy>(zero: T, room: &mut [MaybeUninit<T>]) -> &mut [T] {
    room.fill(MaybeUninit::new(zero));
    // SAFETY: every element has just been written.
    unsafe { room.assume_init_mut() }
}

#[cfg(test)]
mod tests {
    use super::filled;

    #[test]
    fn every_part_is_written() {
        for (len, part_len) in [(0, 3), (1, 3), (10, 3), (100_000, 777), (5, 0)] {
            let (values, starts) = filled(7usize, len, part_len, |start, part| {
                assert!(part.iter().all(|x| *x == 7));
                for (i, x) in part.iter_mut().enumerate() {
                    *x += start + i;
                }
                start
            });
            assert!(values.iter().enumerate().all(|(i, x)| *x == i + 7), "{len}");
            assert_eq!(values.len(), len);
            assert!(starts.is_sorted());
        }
    }

    #[test]
    fn a_panic_in_a_part_comes_through() {
        let run = || filled(0u8, 1000, 10, |start, _| assert!(start != 500));
        assert!(std::panic::catch_unwind(run).is_err());
    }
}
