//! Blocks with dynamic range expansion.

use std::collections::BTreeSet;

use super::random_f32;
use crate::{
    EXPANDED_BLOCK as BLOCK, EXPANDED_CURVES, EXPANDED_WORDS, Expansion, Format, RandomWords,
    StochasticKey,
    expansion::{Curve, decode_block, encode_block, factors},
    kernels::{Isa, expanded},
    random_words,
};

const KEY: StochasticKey = StochasticKey {
    seed: 5,
    step: 3,
    tensor: 1,
};

/// Codes, amaxes and curves.
type Coded = (Vec<u8>, Vec<f32>, Vec<u8>);

/// All options, with and without random words.
fn options() -> impl Iterator<Item = (Expansion, bool)> {
    (0..8).map(|bits| {
        let expansion = Expansion {
            expands: bits & 1 == 1,
            non_negative: bits & 2 == 2,
        };
        (expansion, bits & 4 == 4)
    })
}

/// Those of `len` elements.
fn words(key: StochasticKey, len: usize) -> Vec<u32> {
    let mut words = vec![0; len.div_ceil(BLOCK) * EXPANDED_WORDS];
    random_words(key, 0, &mut words);
    words
}

const ROTATED: u32 = 10;

fn coded(isa: Isa, values: &[f32], expansion: Expansion, words: Option<&[u32]>) -> Coded {
    let blocks = values.len().div_ceil(BLOCK);
    let (mut codes, mut amaxes) = (vec![0; values.len()], vec![0.; blocks]);
    let mut curves = vec![0; blocks];
    let random = words.map(|words| RandomWords {
        words,
        rotated: ROTATED,
    });
    let outs = (&mut codes[..], &mut amaxes[..], &mut curves[..]);
    expanded::encode(isa, values, expansion, random, outs);
    (codes, amaxes, curves)
}

fn decoded(isa: Isa, (codes, amaxes, curves): &Coded) -> Vec<f32> {
    let mut values = vec![0.; codes.len()];
    expanded::decode(isa, codes, amaxes, curves, &mut values);
    values
}

/// Blocks of every spread: each curve is used.
fn values(len: usize, sign: bool) -> Vec<f32> {
    let value = |i: usize| {
        let (block, noise) = (i / BLOCK, (i as f32 * 12.9898).sin());
        let x = match block % 5 {
            0 => 1. + 0.1 * noise,
            1 => noise,
            2 => noise.abs().powi(200) + 1e-4,
            3 if i % BLOCK == 7 => 50.,
            3 => 1e-3 * noise,
            _ => 0.,
        };
        let x = x * 10f32.powi(block as i32 % 7 - 6);
        if sign { x } else { x.abs() }
    };
    (0..len).map(value).collect()
}

/// A code and its value, in f64; `word` is rotated until the bits that count are the upper ones.
fn reference(x: f32, amax: f64, k: f64, non_negative: bool, word: Option<u32>) -> (u8, f64) {
    let t = if amax == 0. {
        0.
    } else {
        f64::from(x.abs()) / amax
    };
    let y = 448. * t.powf(k);
    // The last code that is not above it, and how far it is on the way to the next one.
    let value = |code: u8| f64::from(Format::E4M3.decode(code));
    let below = (0..0x7F).rfind(|code| value(*code) <= y).unwrap_or(0);
    let share = match below {
        0x7E => 0.,
        below => (y - value(below)) / (value(below + 1) - value(below)),
    };
    let up = match word {
        Some(word) => (share * 2f64.powi(20)) as u32 + (word >> 12) >= 1 << 20,
        None => share > 0.5 || share == 0.5 && below % 2 == 1,
    };
    let mut code = below + u8::from(up);
    if non_negative && x > 0. && code == 0 {
        code = 1;
    }
    let decoded = (amax * (value(code) / 448.).powf(1. / k)).copysign(f64::from(x));
    (code | u8::from(x.is_sign_negative()) << 7, decoded)
}

#[test]
fn codes_and_values_are_those_of_the_definition() {
    let isa = Isa::best();
    for (expansion, stochastic) in options() {
        let values = values(20 * BLOCK + 57, !expansion.non_negative);
        let words = stochastic.then(|| words(KEY, values.len()));
        let coded = coded(isa, &values, expansion, words.as_deref());
        let found = decoded(isa, &coded);
        assert!(expansion.expands == coded.2.iter().any(|curve| *curve > 0));
        let mut differ = 0;
        for (b, block) in values.chunks(BLOCK).enumerate() {
            let magnitudes = block.iter().map(|x| f64::from(x.abs()));
            let amax = magnitudes.clone().fold(0., f64::max);
            let k = match amax / (magnitudes.sum::<f64>() / block.len() as f64) {
                _ if !expansion.expands => 1.,
                s if s <= 1.25 => 4.,
                s if s <= 10. => 2.,
                s if s <= 48. => 1.,
                _ => 0.5,
            };
            for (i, x) in block.iter().enumerate() {
                let at = b * BLOCK + i;
                let word = words.as_ref().map(|words| {
                    let (half, i) = (i / EXPANDED_WORDS, i % EXPANDED_WORDS);
                    words[b * EXPANDED_WORDS + i].rotate_left(ROTATED + 16 * half as u32)
                });
                let (code, exact) = reference(*x, amax, k, expansion.non_negative, word);
                if code != coded.0[at] {
                    differ += 1;
                } else {
                    let error = (f64::from(found[at]) - exact).abs();
                    assert!(error <= 1e-6 * exact.abs(), "{at}: {} {exact}", found[at]);
                }
            }
        }
        // f32 may round to the other side of a border between two codes, rarely.
        assert!(differ <= 3, "{expansion:?} {stochastic}: {differ}");
    }
}

#[test]
fn every_instruction_set_is_the_definition() {
    let mut all = values(35 * BLOCK, true);
    all.extend(random_f32(20 * BLOCK));
    let scaled = random_f32(20 * BLOCK).into_iter().map(|x| x % 1e3);
    all.extend(scaled);
    let words = words(KEY, all.len());
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let parts = [1, 15, 16, 63, 64, 65, 127, 128, 129, 300, all.len()];
    let from_the_start = parts.map(|len| 0..len).into_iter();
    let within = (0..all.len() - 200).step_by(1999).map(|at| at..at + 200);
    for range in from_the_start.chain(within) {
        let values = &all[range.clone()];
        let words = &words[..range.len().div_ceil(BLOCK) * EXPANDED_WORDS];
        for (expansion, stochastic) in options() {
            let words = stochastic.then_some(words);
            let (mut codes, mut amaxes, mut curves) = (vec![], vec![], vec![]);
            let mut back = vec![];
            for (block, values) in values.chunks(BLOCK).enumerate() {
                let own = words.map(|words| RandomWords {
                    words: &words[block * EXPANDED_WORDS..],
                    rotated: ROTATED,
                });
                let (mut of_block, mut decoded) = ([0; BLOCK], [0.; BLOCK]);
                let of_block = &mut of_block[..values.len()];
                let (amax, curve) = encode_block(values, expansion, own, of_block);
                let decoded = &mut decoded[..values.len()];
                decode_block(of_block, amax, curve, decoded);
                codes.extend_from_slice(of_block);
                back.extend_from_slice(decoded);
                amaxes.push(amax);
                curves.push(curve as u8);
            }
            for isa in Isa::available() {
                let found = coded(isa, values, expansion, words);
                let what = format!("{isa:?} {expansion:?} {stochastic} {range:?}");
                assert_eq!(bits(&found.1), bits(&amaxes), "{what}");
                assert_eq!(found.2, curves, "{what}");
                assert_eq!(found.0, codes, "{what}");
                let found = decoded(isa, &found);
                for (found, expected) in found.iter().zip(&back) {
                    let same = found.to_bits() == expected.to_bits();
                    assert!(same || found.is_nan() && expected.is_nan(), "{what}");
                }
            }
        }
    }
}

#[test]
fn every_code_is_decoded_on_every_instruction_set() {
    let codes: Vec<u8> = (0..=255).collect();
    for isa in Isa::available() {
        for curve in 0..=EXPANDED_CURVES {
            let coded = (codes.clone(), vec![0.37, 1e-40], vec![curve; 2]);
            let values = decoded(isa, &coded);
            for (code, value) in codes.iter().zip(values) {
                let amax = coded.1[usize::from(*code) / BLOCK];
                let expected = amax * Curve::of(curve).shares().values[usize::from(*code)];
                let same = value.to_bits() == expected.to_bits();
                assert!(
                    same || value.is_nan() && expected.is_nan(),
                    "{isa:?} {code}"
                );
            }
        }
    }
}

#[test]
fn every_curve_is_inverted_and_the_largest_comes_back_exactly() {
    let isa = Isa::best();
    let expansion = Expansion {
        expands: true,
        ..Expansion::default()
    };
    let values = values(35 * BLOCK, true);
    let all = coded(isa, &values, expansion, None);
    let used: BTreeSet<u8> = all.2.iter().copied().collect();
    assert_eq!(used.len(), usize::from(EXPANDED_CURVES));
    let found = decoded(isa, &all);
    for (block, found) in values.chunks(BLOCK).zip(found.chunks(BLOCK)) {
        let amax = |x: &[f32]| x.iter().fold(0f32, |max, x| max.max(x.abs()));
        assert_eq!(amax(block), amax(found));
    }
    // Coded again they are the same.
    assert_eq!(coded(isa, &found, expansion, None).1, all.1);
}

/// Blocks of all magnitudes. A share that was just below 1 would be rounded down at random, if rarely.
#[test]
fn the_share_of_an_amax_is_at_least_1() {
    for bits in (1..f32::INFINITY.to_bits()).step_by(9973) {
        let amax = f32::from_bits(bits);
        let [exact, reciprocal] = factors(amax);
        let share = |x: f32| x * exact * reciprocal;
        let own = share(amax);
        assert!((1. ..1. + 3e-7).contains(&own), "{amax:e}: {own}");
        let x = amax * 0.3;
        let (found, expected) = (f64::from(share(x)), f64::from(x) / f64::from(amax));
        assert!(
            (found / expected - 1.).abs() < 3e-7 || expected == 0.,
            "{amax:e}: {found}"
        );
    }
    assert_eq!(factors(0.), [1.; 2]);
}

#[test]
fn a_value_above_zero_stays_above_zero() {
    let mut values = vec![1e-30f32; BLOCK];
    values[0] = 1.;
    let expansion = Expansion {
        expands: false,
        non_negative: true,
    };
    let words = words(KEY, BLOCK);
    for words in [None, Some(&words[..])] {
        let all = coded(Isa::best(), &values, expansion, words);
        assert!(all.0[1..].iter().all(|code| *code == 1));
        assert!(decoded(Isa::best(), &all).iter().all(|x| *x > 0.));
    }
}

#[test]
fn what_is_not_finite_is_not_hidden() {
    let mut values = vec![1f32; BLOCK];
    (values[3], values[5]) = (f32::NAN, f32::INFINITY);
    let all = coded(Isa::best(), &values, Expansion::default(), None);
    let found = decoded(Isa::best(), &all);
    assert!(found[3].is_nan());
    assert_eq!(found[5], f32::MAX);
}

/// On the curve; what the codes stand for is off by less where the curve is bent.
#[test]
fn the_mean_of_stochastic_codes_is_the_value() {
    for expands in [false, true] {
        let bend = if expands { 1. / 256. } else { 0. };
        let expansion = Expansion {
            expands,
            ..Expansion::default()
        };
        let values: Vec<f32> = (0..BLOCK).map(|i| 0.5 + i as f32 / 256.).collect();
        let mut sums = vec![0f64; BLOCK];
        let rounds = 2000;
        for step in 0..rounds {
            let words = words(StochasticKey { step, ..KEY }, BLOCK);
            let all = coded(Isa::best(), &values, expansion, Some(&words));
            assert_eq!(expands, all.2[0] > 0);
            for (sum, x) in sums.iter_mut().zip(decoded(Isa::best(), &all)) {
                *sum += f64::from(x);
            }
        }
        for (value, sum) in values.iter().zip(sums) {
            // Codes are up to 1/16 apart: six standard deviations of their mean.
            let bound = 6. * (1. / 32.) / f64::from(rounds).sqrt() + bend;
            let error = (sum / f64::from(rounds) - f64::from(*value)).abs();
            assert!(error < bound, "{value}: {error}");
        }
    }
}

#[test]
fn elements_that_share_a_word_are_rounded_apart() {
    // In the middle between two codes, but for the amax.
    let mut values = vec![1.0625f32; BLOCK];
    values[0] = 448.;
    let rounds = 200;
    let mut equal = 0;
    for step in 0..rounds {
        let words = words(StochasticKey { step, ..KEY }, BLOCK);
        let (codes, ..) = coded(Isa::best(), &values, Expansion::default(), Some(&words));
        let (first, second) = codes.split_at(EXPANDED_WORDS);
        let pairs = first.iter().zip(second).skip(1);
        equal += pairs.filter(|(first, second)| first == second).count();
    }
    let share = equal as f64 / (f64::from(rounds) * (EXPANDED_WORDS - 1) as f64);
    // Five standard deviations.
    assert!((share - 0.5).abs() < 0.0225, "{share}");
}
