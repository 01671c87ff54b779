//! Every kernel on every instruction set of the machine against the scalar definition.

mod decode;
mod divided;
mod encode;
mod exact;
mod expanded;

use half::{bf16, f16};

use super::{Isa, Layout, amax, convert};
use crate::{HighPrecision, StochasticKey};

/// Under Miri, which takes a thousand times as long, only every 509th value is tested.
const MIRI_STEP: usize = if cfg!(miri) { 509 } else { 1 };

/// Every bf16 or every f16.
fn all<T>(from_bits: impl Fn(u16) -> T) -> Vec<T> {
    (0..=u16::MAX).step_by(MIRI_STEP).map(from_bits).collect()
}

/// Random bit patterns, and as many with exponents in the range of the formats.
fn random_f32(len: usize) -> Vec<f32> {
    let key = StochasticKey {
        seed: 7,
        ..Default::default()
    };
    let pattern = |index: usize| {
        let word = key.word(index as u64);
        if index.is_multiple_of(2) {
            word
        } else {
            word & 0x807F_FFFF | (100 + (word >> 23) % 48) << 23
        }
    };
    let specials = [
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        -f32::NAN,
        464.0,
        61440.0,
        248.0,
    ];
    (0..len.div_ceil(MIRI_STEP).max(len.min(400)))
        .map(|index| f32::from_bits(pattern(index)))
        .chain(specials)
        .collect()
}

#[test]
fn amax_is_the_largest_magnitude_with_nan_above_infinity() {
    const LEN: usize = 1300;
    let mut src: Vec<f32> = (0..LEN).map(|i| -((i * 919 % LEN) as f32) / 7.0).collect();
    for (position, value) in [(0, 1.0), (130, f32::NEG_INFINITY), (LEN - 1, -f32::NAN)] {
        src[position] = value;
        for isa in Isa::available() {
            for len in [1, 7, 32, 100, LEN] {
                // Some of what was there before is larger.
                let before = |index: usize| (index % 3) as f32 * 60.0;
                let mut out: Vec<f32> = (0..LEN.div_ceil(len)).map(before).collect();
                amax::merge(isa, &src, Layout::Segments(len), &mut out);
                for (index, (chunk, out)) in src.chunks(len).zip(out).enumerate() {
                    let expected = chunk.iter().fold(before(index), |max, x| {
                        if max.is_nan() || x.is_nan() {
                            f32::NAN
                        } else {
                            max.max(x.abs())
                        }
                    });
                    assert!(
                        out == expected || out.is_nan() && expected.is_nan(),
                        "{isa:?} {len}: {out} {expected}"
                    );
                }
            }
            let mut out = vec![2.0; LEN];
            amax::merge(isa, &src, Layout::PerElement, &mut out);
            for (x, out) in src.iter().zip(out) {
                assert!(
                    out == x.abs().max(2.0) || x.is_nan() && out.is_nan(),
                    "{isa:?} {x} {out}"
                );
            }
        }
    }
}

#[test]
fn amax_of_16_bits_is_that_of_f32() {
    fn check<T: HighPrecision>(all: Vec<T>) {
        let bits = |x: &T| x.to_f32().to_bits() & 0x7FFF_FFFF;
        for isa in Isa::available() {
            for len in [1, 31, 32, 100, 128, 200, 1 << 16] {
                let mut out = vec![0.0; all.len().div_ceil(len)];
                amax::merge(isa, &all, Layout::Segments(len), &mut out);
                for (chunk, out) in all.chunks(len).zip(out) {
                    assert_eq!(
                        Some(out.to_bits()),
                        chunk.iter().map(bits).max(),
                        "{isa:?} {len}"
                    );
                }
            }
        }
    }
    check(all(bf16::from_bits));
    check(all(f16::from_bits));
}

#[test]
fn conversions_equal_those_of_half() {
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
    for bits in (0..=u16::MAX).step_by(MIRI_STEP) {
        let value = f16::from_bits(bits);
        assert!(
            same(convert::f16_to_f32(value), value.to_f32_const()),
            "f16 {bits:#x}"
        );
        let value = bf16::from_bits(bits);
        assert!(
            same(convert::bf16_to_f32(value), value.to_f32_const()),
            "bf16 {bits:#x}"
        );
    }
    for x in random_f32(300_000) {
        let (ours, halfs) = (convert::f32_to_f16(x), f16::from_f32_const(x));
        assert!(
            same(ours.to_f32(), halfs.to_f32()),
            "f16 of {x:e}: {ours} {halfs}"
        );
        let (ours, halfs) = (convert::f32_to_bf16(x), bf16::from_f32_const(x));
        assert!(
            same(ours.to_f32(), halfs.to_f32()),
            "bf16 of {x:e}: {ours} {halfs}"
        );
    }
}
