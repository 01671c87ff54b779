//! Which rank holds which elements of a parameter.

use std::ops::Range;

/// Ranges end at multiples of so many elements inside a parameter: the blocks in which optimizers add up the squares of gradients, so
/// that the norm over parts has the bits of the norm over whole gradients.
pub const BLOCK: usize = 1 << 14;

/// The elements of one parameter that each rank holds: a range of the flat tensor, in the order of ranks.
///
/// ```
/// use fp8_ranks::{BLOCK, Layout};
/// let mut held = [0; 2];
/// let large = Layout::new(4 * BLOCK + 5, &mut held);
/// assert_eq!(large.counts(), [3 * BLOCK, BLOCK + 5]);
/// // A small parameter lies whole on the rank that holds the least.
/// assert_eq!(Layout::new(10, &mut held).counts(), [0, 10]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    counts: Vec<usize>,
}

impl Layout {
    /// Deals out `len` elements in whole blocks, evenly; what is left goes to the ranks that hold the least. `held`: the elements of each
    /// rank so far; this adds to them.
    pub fn new(len: usize, held: &mut [usize]) -> Self {
        let (ranks, blocks) = (held.len().max(1), len.div_ceil(BLOCK));
        let mut order: Vec<usize> = (0..held.len()).collect();
        order.sort_by_key(|&rank| held[rank]);
        let mut share = vec![blocks / ranks; held.len()];
        for &rank in &order[..(blocks % ranks).min(order.len())] {
            share[rank] += 1;
        }
        let (mut counts, mut begin) = (vec![], 0);
        for (share, held) in share.into_iter().zip(held) {
            let end = (begin + share * BLOCK).min(len);
            counts.push(end - begin);
            *held += end - begin;
            begin = end;
        }
        Self { counts }
    }

    /// Elements of each rank.
    pub fn counts(&self) -> &[usize] {
        &self.counts
    }

    /// Elements of all ranks.
    pub fn elem_count(&self) -> usize {
        self.counts.iter().sum()
    }

    /// The elements of `rank`.
    pub fn range(&self, rank: usize) -> Range<usize> {
        let begin = self.counts.iter().take(rank).sum();
        begin..begin + self.counts.get(rank).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_held_once_and_ranges_end_at_blocks() {
        let mut held = vec![0; 3];
        for len in [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 7 * BLOCK + 3, 30 * BLOCK] {
            let before: usize = held.iter().sum();
            let layout = Layout::new(len, &mut held);
            assert_eq!((layout.elem_count(), layout.counts().len()), (len, 3));
            assert_eq!(held.iter().sum::<usize>(), before + len);
            let mut end = 0;
            for rank in 0..3 {
                let range = layout.range(rank);
                assert_eq!(range.start, end);
                end = range.end;
                assert!(end % BLOCK == 0 || end == len, "{layout:?}");
            }
        }
    }

    #[test]
    fn small_parameters_spread_over_the_ranks() {
        let mut held = vec![0; 4];
        for _ in 0..16 {
            Layout::new(100, &mut held);
        }
        assert_eq!(held, [400; 4]);
    }
}
