//! Every kernel on every instruction set of the machine against the scalar definition.

use half::{bf16, f16};

use super::{Isa, amax, convert, decode::Decoder, general, nearest, nearest::Nearest};
use crate::{Cast, Format, HighPrecision, Overflow, Rounding, StochasticKey};

const SCALES: [f32; 4] = [1.0, 1.7, -0.003, 3.0e38];

/// Every bf16 or every f16.
fn all<T>(from_bits: impl Fn(u16) -> T) -> Vec<T> {
    (0..=u16::MAX).map(from_bits).collect()
}

/// Random bit patterns, and as many with exponents where the formats have their values.
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
    (0..len)
        .map(|index| f32::from_bits(pattern(index)))
        .chain(specials)
        .collect()
}

fn plain_casts() -> impl Iterator<Item = Cast> {
    let overflows = [Overflow::Saturate, Overflow::NonFinite];
    Format::ALL
        .into_iter()
        .flat_map(move |format| overflows.map(|mode| Cast::new(format).with_overflow(mode)))
}

fn other_casts() -> impl Iterator<Item = Cast> {
    let key = StochasticKey {
        seed: 1 << 40 | 3,
        step: 5,
        tensor: 9,
    };
    let roundings = [
        Rounding::NearestEven,
        Rounding::Stochastic(key),
        Rounding::TowardZero,
        Rounding::NearestAway,
        Rounding::TowardPositive,
        Rounding::TowardNegative,
    ];
    plain_casts().flat_map(move |cast| {
        roundings.into_iter().flat_map(move |rounding| {
            [true, false].map(|f16| cast.with_rounding(rounding).with_via_f16(f16))
        })
    })
}

fn assert_codes<T: HighPrecision>(
    cast: &Cast,
    isa: Isa,
    src: &[T],
    scales: &[f32],
    expected: &[u8],
    codes: &[u8],
) {
    for (i, (&code, &expected)) in codes.iter().zip(expected).enumerate() {
        let (x, scale) = (src[i].to_f32(), scales[i]);
        assert_eq!(
            code,
            expected,
            "{cast:?} {isa:?}: {x:e} ({:#x}) * {scale:e}",
            x.to_bits()
        );
    }
}

/// All layouts of the nearest-even kernel give the codes of the definition.
fn check_nearest<T: HighPrecision>(src: &[T]) {
    let amax = src
        .iter()
        .map(|x| x.to_f32().to_bits() & 0x7FFF_FFFF)
        .max()
        .unwrap();
    let scales: Vec<f32> = (0..src.len()).map(|i| SCALES[i / 100 % 4]).collect();
    let hundreds: Vec<f32> = scales.iter().copied().step_by(100).collect();
    for cast in plain_casts() {
        let kernel = Nearest::new(&cast).unwrap();
        let whole: Vec<u8> = src.iter().map(|x| cast.encode(x.to_f32(), 0)).collect();
        let scaled: Vec<u8> = src
            .iter()
            .zip(&scales)
            .map(|(x, &s)| cast.encode_scaled(x.to_f32(), s, 0))
            .collect();
        for isa in Isa::available() {
            let mut codes = vec![0x55; src.len()];
            let max = nearest::segments::<T, true>(isa, kernel, src, src.len(), &[1.0], &mut codes);
            assert_codes(&cast, isa, src, &vec![1.0; src.len()], &whole, &codes);
            assert_eq!(max, amax, "{isa:?}");

            codes.fill(0x55);
            nearest::segments::<T, false>(isa, kernel, src, 100, &hundreds, &mut codes);
            assert_codes(&cast, isa, src, &scales, &scaled, &codes);

            codes.fill(0x55);
            let max = nearest::columns::<T, true>(isa, kernel, src, &scales, &mut codes);
            assert_codes(&cast, isa, src, &scales, &scaled, &codes);
            assert_eq!(max, amax, "{isa:?}");
        }
    }
}

#[test]
fn nearest_kernels_equal_the_definition_on_all_bf16() {
    check_nearest(&all(bf16::from_bits));
}

#[test]
fn nearest_kernels_equal_the_definition_on_all_f16() {
    check_nearest(&all(f16::from_bits));
}

#[test]
fn nearest_kernels_equal_the_definition_on_random_f32() {
    check_nearest(&random_f32(200_000));
}

#[test]
fn nearest_kernels_equal_the_definition_on_f64() {
    check_nearest(
        &random_f32(5_000)
            .into_iter()
            .map(|x| f64::from(x) * 1.000_000_07)
            .collect::<Vec<_>>(),
    );
}

#[test]
fn other_roundings_equal_the_definition() {
    let src = random_f32(2_000);
    let scales: Vec<f32> = (0..src.len()).map(|i| SCALES[i / 100 % 4]).collect();
    let hundreds: Vec<f32> = scales.iter().copied().step_by(100).collect();
    let first = (1 << 34) + 3;
    for cast in other_casts() {
        let encode = |(i, x): (usize, &f32)| cast.encode_scaled(*x, scales[i], first + i as u64);
        let expected: Vec<u8> = src.iter().enumerate().map(encode).collect();
        for isa in Isa::available() {
            let mut codes = vec![0x55; src.len()];
            general::segments::<f32, false>(isa, &cast, &src, 100, &hundreds, first, &mut codes);
            assert_codes(&cast, isa, &src, &scales, &expected, &codes);

            codes.fill(0x55);
            let max = general::columns::<f32, true>(isa, &cast, &src, &scales, first, &mut codes);
            assert_codes(&cast, isa, &src, &scales, &expected, &codes);
            assert!(f32::from_bits(max).is_nan());
        }
    }
}

fn check_decode<T: HighPrecision>(round: impl Fn(f32) -> T) {
    let codes: Vec<u8> = (0..1000).map(|i| i as u8).collect();
    for format in Format::ALL {
        let decoder = Decoder::new(format);
        for scale in [1.0, 0.37, -1e-3, 1e-38, 1e36] {
            let expected = |code: u8| round(format.decode(code) * scale).to_f32();
            for isa in Isa::available() {
                let mut segments = vec![T::default(); codes.len()];
                super::decode::segments(isa, decoder, &codes, 77, &[scale; 13], &mut segments);
                let mut columns = vec![T::default(); codes.len()];
                super::decode::columns(isa, decoder, &codes, &[scale; 1000], &mut columns);
                for values in [segments, columns] {
                    for (&code, value) in codes.iter().zip(values) {
                        let (value, expected) = (value.to_f32(), expected(code));
                        let same = value.to_bits() == expected.to_bits()
                            || value.is_nan() && expected.is_nan();
                        assert!(
                            same,
                            "{format} {isa:?}: {code:#x} * {scale:e} = {value:e}, not {expected:e}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn decoding_equals_the_definition() {
    check_decode(|x| x);
    check_decode(bf16::from_f32);
    check_decode(f16::from_f32);
    check_decode(f64::from);
}

#[test]
fn amax_is_the_largest_magnitude_with_nan_above_infinity() {
    let mut src: Vec<f32> = (0..300).map(|i| -(i as f32) / 7.0).collect();
    for (position, value) in [(0, 1.0), (130, f32::NEG_INFINITY), (299, -f32::NAN)] {
        src[position] = value;
        for isa in Isa::available() {
            for len in [1, 7, 32, 100, 300] {
                let mut out = vec![0.0; 300usize.div_ceil(len)];
                amax::segments(isa, &src, len, &mut out);
                for (chunk, out) in src.chunks(len).zip(out) {
                    let expected = chunk.iter().fold(0.0f32, |max, x| {
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
            let mut out = vec![2.0; 300];
            amax::columns(isa, &src, &mut out);
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
fn conversions_equal_those_of_half() {
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
    for bits in 0..=u16::MAX {
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
