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
    filled_in_pieces(zero, len, [part_len; 2], |pieces| {
        let (start, part) = pieces.next().unwrap_or_default();
        task(start, part)
    })
}

/// [`filled`] by tasks that write their parts in pieces, in order, each of which stays in the core's own cache while it is written.
pub(crate) fn filled_in_pieces<T: Copy + Send + Sync, Out: Send>(
    zero: T,
    len: usize,
    [part_len, piece_len]: [usize; 2],
    task: impl Fn(&mut Pieces<'_, T>) -> Out + Sync,
) -> (Vec<T>, Vec<Out>) {
    let mut values = pages::vec_for(len);
    let [part_len, piece_len] = [part_len, piece_len].map(|len| len.max(1));
    let parts = values.spare_capacity_mut()[..len].chunks_mut(part_len);
    let outs = crate::base::parallel::map(parts.enumerate(), |(index, room)| {
        let start = index * part_len;
        let mut pieces = Pieces {
            zero,
            start,
            piece_len,
            room,
        };
        let out = task(&mut pieces);
        zeros(zero, pieces.room);
        out
    });
    // SAFETY: all pieces of every part are written when they are taken, and the others after the task. After a panic this place is not
    // reached.
    unsafe { values.set_len(len) };
    (values, outs)
}

/// The pieces of a part that a task has not taken, and the index of the next one's first element.
pub(crate) struct Pieces<'a, T> {
    zero: T,
    start: usize,
    piece_len: usize,
    room: &'a mut [MaybeUninit<T>],
}

impl<'a, T: Copy> Iterator for Pieces<'a, T> {
    type Item = (usize, &'a mut [T]);

    fn next(&mut self) -> Option<Self::Item> {
        let len = self.piece_len.min(self.room.len());
        let piece = self.room.split_off_mut(..len).filter(|_| len > 0)?;
        let start = self.start;
        self.start += len;
        Some((start, zeros(self.zero, piece)))
    }
}

/// `room`, filled with `zero`.
pub(super) fn zeros<T: Copy>(zero: T, room: &mut [MaybeUninit<T>]) -> &mut [T] {
    room.fill(MaybeUninit::new(zero));
    // SAFETY: every element has just been written.
    unsafe { room.assume_init_mut() }
}

#[cfg(test)]
mod tests {
    use super::{filled, filled_in_pieces};

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
    fn pieces_of_a_part_come_in_order_and_all_are_written() {
        for (len, part_len, piece_len) in [(0, 3, 2), (10, 4, 3), (100_000, 777, 100), (5, 0, 0)] {
            let (values, ends) = filled_in_pieces(7, len, [part_len, piece_len], |pieces| {
                let mut end = None;
                // The last ones of a part are not taken.
                for (start, piece) in pieces.take(6) {
                    assert!(end.is_none_or(|end| end == start));
                    assert!(piece.len() <= piece_len.max(1) && piece.iter().all(|x| *x == 7));
                    piece.fill(start);
                    end = Some(start + piece.len());
                }
                end.unwrap_or(0)
            });
            assert_eq!(values.len(), len);
            let (part_len, piece_len) = (part_len.max(1), piece_len.max(1));
            for (i, value) in values.into_iter().enumerate() {
                let part = i / part_len;
                let piece = part * part_len + i % part_len / piece_len * piece_len;
                assert_eq!(value, if i < ends[part] { piece } else { 7 });
            }
        }
    }

    #[test]
    fn a_panic_in_a_part_comes_through() {
        let run = || filled(0u8, 1000, 10, |start, _| assert!(start != 500));
        assert!(std::panic::catch_unwind(run).is_err());
    }
}
