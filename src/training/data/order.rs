//! Random orders that are functions of their seed alone.

use fp8_core::philox4x32_10;

/// What held-out pieces and documents are drawn with, whatever the seed of the order.
const HELD_OUT: u64 = u64::MAX;

/// The numbers below `count` in the order of their Philox words: of `seed` as the key, the number and `epoch` as the counter.
pub(super) fn shuffled(count: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let halves = |word: u64| [word as u32, (word >> 32) as u32];
    let [low, high] = halves(epoch);
    let random = |&index: &usize| {
        let [first, second] = halves(index as u64);
        philox4x32_10([first, second, low, high], halves(seed))
    };
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_cached_key(random);
    order
}

/// Which of `count` are held out for validation.
pub(super) fn held_out(count: usize, share: f64) -> Vec<bool> {
    let mut held = vec![false; count];
    if share > 0. && count >= 2 {
        let number = (share * count as f64).round() as usize;
        let number = number.clamp(1, count - 1);
        for index in shuffled(count, HELD_OUT, HELD_OUT).drain(..number) {
            held[index] = true;
        }
    }
    held
}
