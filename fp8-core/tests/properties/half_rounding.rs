//! Stochastic rounding to bf16 and f16.

use fp8_core::{HalfPrecision, StochasticKey, stochastic_round};
use half::{bf16, f16};
use proptest::prelude::*;

const SAMPLES: usize = 1 << 18;

/// Bits, so that NaN and the signs of zeros count.
trait Bits: HalfPrecision + PartialEq + std::fmt::Debug {
    const INFINITY: u16;
    fn of(bits: u16) -> Self;
    fn bits(self) -> u16;
}

impl Bits for bf16 {
    const INFINITY: u16 = 0x7F80;
    fn of(bits: u16) -> Self {
        Self::from_bits(bits)
    }
    fn bits(self) -> u16 {
        self.to_bits()
    }
}

impl Bits for f16 {
    const INFINITY: u16 = 0x7C00;
    fn of(bits: u16) -> Self {
        Self::from_bits(bits)
    }
    fn bits(self) -> u16 {
        self.to_bits()
    }
}

/// The value of a code, with the code of infinity standing for the next finite value.
fn wide<T: Bits>(code: u16) -> f64 {
    match code == T::INFINITY {
        false => T::of(code).to_f32().into(),
        true => {
            let [below, last] = [code - 2, code - 1].map(|c| f64::from(T::of(c).to_f32()));
            2. * last - below
        }
    }
}

/// The two codes around a finite |x|, and where x lies between them, exactly: f64 has room for it.
fn neighbours<T: Bits>(x: f32) -> (u16, u16, f64) {
    let x = f64::from(x.abs());
    let (mut low, mut high) = (0, T::INFINITY);
    if x >= wide::<T>(high) {
        return (high, high, 0.);
    }
    while high - low > 1 {
        let middle = (low + high) / 2;
        match wide::<T>(middle) <= x {
            true => low = middle,
            false => high = middle,
        }
    }
    let (a, b) = (wide::<T>(low), wide::<T>(high));
    (low, high, (x - a) / (b - a))
}

/// A normal, a subnormal and the largest finite value of each type.
fn starts<T: Bits>() -> [u16; 3] {
    [T::of(0).bits() + T::INFINITY / 2, 5, T::INFINITY - 1]
}

fn frequencies<T: Bits>() {
    for (i, low) in starts::<T>().into_iter().enumerate() {
        for (j, fraction) in [0.125, 0.25, 0.5, 0.75, 0.875].into_iter().enumerate() {
            for sign in [1., -1.] {
                let (a, b) = (wide::<T>(low), wide::<T>(low + 1));
                let x = sign * (a + fraction * (b - a));
                assert_eq!(f64::from(x as f32), x, "the test needs an exact value");
                let key = StochasticKey {
                    seed: 11,
                    step: i as u32,
                    tensor: j as u32,
                };
                let mut out = vec![T::default(); SAMPLES];
                stochastic_round(key, 0, &vec![x as f32; SAMPLES], &mut out);
                let sign_bit = if sign < 0. { 0x8000 } else { 0 };
                let up = out.iter().filter(|o| o.bits() == (low + 1) | sign_bit);
                let up = up.count();
                let down = out.iter().filter(|o| o.bits() == low | sign_bit).count();
                assert_eq!(up + down, SAMPLES, "only the two neighbours of {x:e}");
                let error = (fraction * (1. - fraction) / SAMPLES as f64).sqrt();
                let got = up as f64 / SAMPLES as f64;
                assert!((got - fraction).abs() <= 4. * error, "{x:e}: {got}");
            }
        }
    }
}

#[test]
fn the_share_rounded_up_is_the_fraction() {
    frequencies::<bf16>();
    frequencies::<f16>();
}

#[test]
fn values_of_the_type_stay() {
    fn all<T: Bits>() {
        for bits in 0..=u16::MAX {
            let value = T::of(bits).to_f32();
            for word in [0, 1 << 31, u32::MAX] {
                let got = T::from_f32_stochastic(value, word);
                match value.is_nan() {
                    true => {
                        assert!(got.to_f32().is_nan());
                        assert_eq!(got.bits() & 0x8000, bits & 0x8000);
                    }
                    false => assert_eq!(got.bits(), bits),
                }
            }
        }
    }
    all::<bf16>();
    all::<f16>();
}

#[test]
fn beyond_the_largest_value_lies_infinity() {
    // A quarter of the way from 65504 to 65536.
    assert_eq!(
        f16::from_f32_stochastic(65512., (1 << 30) - 1),
        f16::INFINITY
    );
    assert_eq!(f16::from_f32_stochastic(65512., 1 << 30), f16::MAX);
    assert_eq!(
        f16::from_f32_stochastic(-65536., u32::MAX),
        f16::NEG_INFINITY
    );
    assert_eq!(f16::from_f32_stochastic(f32::MAX, u32::MAX), f16::INFINITY);
    assert_eq!(bf16::from_f32_stochastic(f32::MAX, 0), bf16::INFINITY);
    assert_eq!(bf16::from_f32_stochastic(f32::MAX, u32::MAX), bf16::MAX);
    assert_eq!(
        bf16::from_f32_stochastic(f32::NEG_INFINITY, 9),
        bf16::NEG_INFINITY
    );
}

fn against_the_definition<T: Bits>(x: f32, word: u32) -> Result<(), TestCaseError> {
    let got = T::from_f32_stochastic(x, word);
    let (low, high, fraction) = neighbours::<T>(x);
    let up = f64::from(word) < (fraction * 2f64.powi(32)).floor();
    let sign = if x.is_sign_negative() { 0x8000 } else { 0 };
    prop_assert_eq!(
        got.bits(),
        sign | if up { high } else { low },
        "{:e} {}",
        x,
        word
    );
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    /// The definition in f64, with thresholds near the word in half of the cases.
    #[test]
    fn random_rounding_follows_the_definition(bits: u32, word: u32, exponent in 90u32..150, near: bool, offset in 0u32..3) {
        for bits in [bits, bits & 0x807F_FFFF | exponent << 23] {
            let x = f32::from_bits(bits);
            if x.is_nan() || x.is_infinite() {
                continue;
            }
            for half in [false, true] {
                let fraction = if half { neighbours::<f16>(x).2 } else { neighbours::<bf16>(x).2 };
                let threshold = (fraction * 2f64.powi(32)) as u32;
                let word = if near { threshold.wrapping_add(offset).wrapping_sub(1) } else { word };
                if half { against_the_definition::<f16>(x, word)? } else { against_the_definition::<bf16>(x, word)? }
            }
        }
    }
}

proptest! {
    /// The slice version, wherever it is split, is the scalar one with the element's word.
    #[test]
    fn slices_are_the_definition(seed: u64, step: u32, tensor: u32, first in 0u64..1 << 34, len in 0usize..700, split in 0usize..700) {
        let key = StochasticKey { seed, step, tensor };
        let values: Vec<f32> = (0..len).map(|i| ((i as f32) * 0.37 + seed as f32 * 1e-19).sin() * 1e-6).collect();
        let mut out = vec![f16::ZERO; len];
        let split = split.min(len);
        let (a, b) = out.split_at_mut(split);
        stochastic_round(key, first, &values[..split], a);
        stochastic_round(key, first + split as u64, &values[split..], b);
        for (i, (value, got)) in values.iter().zip(&out).enumerate() {
            let expected = f16::from_f32_stochastic(*value, key.word(first + i as u64));
            prop_assert_eq!(got.to_bits(), expected.to_bits());
        }
    }
}
