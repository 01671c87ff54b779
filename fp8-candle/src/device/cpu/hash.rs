//! A fingerprint of a tensor's bits, to see whether a weight has changed since it was quantized.
//!
//! Changes of a weight are not random: some negate, double, swap or zero whole rows. So the hash must not share an algebraic
//! structure with arithmetic on the values. Sums of multiplied words do, and miss `w -> -w`, for example. Rapidhash
//! multiplies 64-bit words that depend on all words before them, and folds the 128 bits of each product. It is scalar code,
//! so it gives the same on every instruction set, and it is as fast as memory.

use bytemuck::{NoUninit, cast_slice};
use rapidhash::v3::rapidhash_v3 as hash;

/// Bytes that one task hashes. The split depends only on the size, as the result must.
const CHUNK: usize = 1 << 18;

/// 64-bit hash of every bit of `values`.
pub(super) fn fingerprint<T: NoUninit>(values: &[T]) -> u64 {
    let bytes: &[u8] = cast_slice(values);
    if bytes.len() <= CHUNK {
        return hash(bytes);
    }
    let hashes: Vec<u64> = crate::base::parallel::map(bytes.chunks(CHUNK), hash);
    hash(cast_slice(&hashes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use proptest::prelude::*;
    use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
    use std::collections::HashSet;

    fn of(values: &[f32]) -> u64 {
        fingerprint(values)
    }

    /// A weight, row by row.
    #[derive(Clone, Debug)]
    struct Weight {
        values: Vec<f32>,
        cols: usize,
    }

    impl Weight {
        fn rows(&self) -> usize {
            self.values.len() / self.cols
        }

        fn map(&self, f: impl Fn(usize, f32) -> f32) -> Vec<f32> {
            let values = self.values.iter().enumerate();
            values.map(|(at, &x)| f(at, x)).collect()
        }

        fn permuted(&self, from: impl Fn(usize) -> usize) -> Vec<f32> {
            (0..self.values.len())
                .map(|at| self.values[from(at)])
                .collect()
        }
    }

    /// Random weights, weights of +-1, and constant ones, in shapes with even and odd numbers of words, up to some chunks.
    fn weights() -> impl Strategy<Value = Weight> {
        let shapes = prop_oneof![
            Just((64, 64)),
            Just((1, 7)),
            Just((17, 33)),
            Just((128, 96)),
            Just((300, 512)),
        ];
        (shapes, 0..3, any::<u32>()).prop_map(|((rows, cols), kind, seed)| {
            let key = fp8_core::StochasticKey {
                seed: seed.into(),
                ..Default::default()
            };
            let value = |at: usize| {
                let word = key.word(at as u64);
                match kind {
                    0 => word as f32 / 2f32.powi(31) - 1.0,
                    1 => 1f32.copysign(word as i32 as f32),
                    _ => 0.02 + seed as f32 * 1e-12,
                }
            };
            let values = (0..rows * cols).map(value).collect();
            Weight { values, cols }
        })
    }

    /// Changes of `w`, in rows `at` and `other`.
    fn changes(w: &Weight, at: usize, other: usize) -> Vec<(&'static str, Vec<f32>)> {
        let (len, cols, rows) = (w.values.len(), w.cols, w.rows());
        let (at, other) = (at % len, other % len);
        let row = at / cols;
        let negate = |yes: &dyn Fn(usize) -> bool| w.map(|i, x| if yes(i) { -x } else { x });
        let set = |bits: u32| w.map(|i, x| if i == at { f32::from_bits(bits) } else { x });
        let flip = |bit: u32| set(w.values[at].to_bits() ^ 1 << bit);
        let mut changes = vec![
            ("negation", negate(&|_| true)),
            ("a negated row", negate(&|i| i / cols == row)),
            ("a negated column", negate(&|i| i % cols == at % cols)),
            ("every other row negated", negate(&|i| i / cols % 2 == 0)),
            ("every other column negated", negate(&|i| i % 2 == 0)),
            ("one negated value", negate(&|i| i == at)),
            ("2 w", w.map(|_, x| 2.0 * x)),
            ("w / 2", w.map(|_, x| 0.5 * x)),
            ("-4 w", w.map(|_, x| -4.0 * x)),
            (
                "a doubled row",
                w.map(|i, x| if i / cols == row { 2.0 * x } else { x }),
            ),
            ("w + 1", w.map(|_, x| x + 1.0)),
            ("zeros", w.map(|_, _| 0.0)),
            ("negative zeros", w.map(|_, _| -0.0)),
            ("a zero", set(0)),
            ("a negative zero", set(0x8000_0000)),
            ("NaN", set(0x7FC0_0000)),
            ("negative NaN", set(0xFFC0_0000)),
            ("NaN with a payload", set(0x7FC0_0001)),
            ("a signaling NaN", set(0x7F80_0001)),
            ("the last bit", flip(0)),
            ("a bit", flip(other as u32 % 32)),
            ("the sign bit", flip(31)),
            (
                "a swap",
                w.permuted(|i| {
                    if i == at {
                        other
                    } else if i == other {
                        at
                    } else {
                        i
                    }
                }),
            ),
            ("reversed", w.permuted(|i| len - 1 - i)),
            ("rotated", w.permuted(|i| (i + 1) % len)),
            ("rows rotated", w.permuted(|i| (i + cols) % len)),
            ("transposed", w.permuted(|i| i % rows * cols + i / rows)),
            ("words swapped", w.permuted(|i| (i ^ 1).min(len - 1))),
            ("longer", [&w.values[..], &[0.0]].concat()),
            ("shorter", w.values[..len - 1].to_vec()),
        ];
        changes.retain(|(_, changed)| bits(changed) != bits(&w.values));
        changes
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|x| x.to_bits()).collect()
    }

    /// Every change of a weight is noticed, and no two of them look the same.
    #[test]
    fn every_change_of_a_weight_is_seen() {
        let cases = if cfg!(miri) { 2 } else { 250 };
        // The same weights in every run.
        let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        let mut runner = TestRunner::new_with_rng(ProptestConfig::with_cases(cases), rng);
        let count = std::cell::Cell::new(0);
        let strategy = (weights(), any::<usize>(), any::<usize>());
        let result = runner.run(&strategy, |(w, at, other)| {
            let base = of(&w.values);
            prop_assert_eq!(base, of(&w.values.clone()));
            let mut seen = HashSet::from([bits(&w.values)]);
            let mut hashes = HashSet::from([base]);
            for (what, changed) in changes(&w, at, other) {
                count.set(count.get() + 1);
                // For a small or regular weight, some changes give the same result.
                if seen.insert(bits(&changed)) {
                    prop_assert!(hashes.insert(of(&changed)), "{}", what);
                }
            }
            Ok(())
        });
        result.unwrap();
        assert!(
            cfg!(miri) || count.get() >= 4_000,
            "{} changes",
            count.get()
        );
    }

    #[test]
    fn every_single_bit_of_every_type_counts() {
        let len = if cfg!(miri) { 100 } else { 200_000 };
        let places = [0, 1, 15, 16, 65_535, 65_536, 199_999];
        for at in places.into_iter().filter(|&at| at < len) {
            let values: Vec<f32> = (0..len).map(|i| (i as f32).sin()).collect();
            let check = |name: &str, hash: &dyn Fn(Option<u32>) -> u64, bits: u32| {
                let hashes = (0..bits).map(|bit| hash(Some(bit))).chain([hash(None)]);
                let distinct: HashSet<u64> = hashes.collect();
                assert_eq!(distinct.len(), bits as usize + 1, "{name} {at}");
            };
            macro_rules! check {
                ($($name:ident $narrow:expr;)+) => {$(
                    let base: Vec<$name> = values.iter().map($narrow).collect();
                    let hash = |bit: Option<u32>| {
                        let mut changed = base.clone();
                        if let Some(bit) = bit {
                            changed[at] = $name::from_bits(changed[at].to_bits() ^ 1 << bit);
                        }
                        fingerprint(&changed)
                    };
                    check(stringify!($name), &hash, 8 * size_of::<$name>() as u32);
                )+};
            }
            check! {
                f32 |&x| x;
                bf16 |&x| bf16::from_f32(x);
                f16 |&x| f16::from_f32(x);
                f64 |&x| x.into();
            }
        }
    }

    #[test]
    fn the_number_of_threads_changes_nothing() {
        let values: Vec<f32> = (0..300_000).map(|i| (i as f32).cos()).collect();
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            pool.build().unwrap().install(|| of(&values))
        };
        assert_eq!(run(1), run(3));
    }
}
