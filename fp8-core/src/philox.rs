//! Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), as in Random123 and cuRAND.
//!
//! A counter-based generator: the bits of an element depend only on its index and the key, not on threads, devices or the
//! order of work.

pub(crate) const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
pub(crate) const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
pub(crate) const ROUNDS: usize = 10;

/// The four random words of `counter` under `key`.
///
/// ```
/// use fp8_core::philox4x32_10;
/// // A test vector of Random123.
/// let words = philox4x32_10([0; 4], [0; 2]);
/// assert_eq!(words, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
/// ```
#[inline]
pub const fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut c0, mut c1, mut c2, mut c3], [mut k0, mut k1]) = (counter, key);
    let mut round = 0;
    while round < ROUNDS {
        let p0 = MULTIPLIERS[0] as u64 * c0 as u64;
        let p1 = MULTIPLIERS[1] as u64 * c2 as u64;
        (c0, c1, c2, c3) = (
            (p1 >> 32) as u32 ^ c1 ^ k0,
            p1 as u32,
            (p0 >> 32) as u32 ^ c3 ^ k1,
            p0 as u32,
        );
        k0 = k0.wrapping_add(KEY_STEPS[0]);
        k1 = k1.wrapping_add(KEY_STEPS[1]);
        round += 1;
    }
    [c0, c1, c2, c3]
}

/// [`philox4x32_10`] of several counters with one key. Each step is a loop over all of them, so that it vectorizes; words lie in lanes of
/// 64 bits, where their products are made, and only the lower half of a lane counts.
#[inline(always)]
pub(crate) fn philox_of_each<const N: usize>(
    counters: [[u64; N]; 4],
    mut key: [u32; 2],
) -> [[u64; N]; 4] {
    const LOW: u64 = u32::MAX as u64;
    let [mut c0, mut c1, mut c2, mut c3] = counters;
    for _ in 0..ROUNDS {
        let [k0, k1] = key.map(u64::from);
        for i in 0..N {
            let p0 = u64::from(MULTIPLIERS[0]) * (c0[i] & LOW);
            let p1 = u64::from(MULTIPLIERS[1]) * (c2[i] & LOW);
            (c0[i], c1[i], c2[i], c3[i]) =
                ((p1 >> 32) ^ c1[i] ^ k0, p1, (p0 >> 32) ^ c3[i] ^ k1, p0);
        }
        for (key, step) in key.iter_mut().zip(KEY_STEPS) {
            *key = key.wrapping_add(step);
        }
    }
    [c0, c1, c2, c3]
}

#[cfg(test)]
mod tests {
    use super::{philox_of_each, philox4x32_10};

    #[test]
    fn several_counters_have_the_words_of_each() {
        let counters: [[u64; 7]; 4] = std::array::from_fn(|word| {
            std::array::from_fn(|i| u64::from((i as u32 + 3).wrapping_mul(0x9E37_79B9 >> word)))
        });
        let key = [0x0123_4567, 0x89AB_CDEF];
        let all = philox_of_each(counters, key);
        for i in 0..7 {
            let words = philox4x32_10(counters.map(|word| word[i] as u32), key);
            assert_eq!(all.map(|word| word[i] as u32), words);
        }
    }

    #[test]
    fn known_answers_of_random123() {
        let cases = [
            (
                [0; 4],
                [0; 2],
                [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8],
            ),
            (
                [u32::MAX; 4],
                [u32::MAX; 2],
                [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD],
            ),
            (
                [0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344],
                [0xA409_3822, 0x299F_31D0],
                [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(
                philox4x32_10(counter, key),
                expected,
                "counter {counter:x?} key {key:x?}"
            );
        }
    }
}
