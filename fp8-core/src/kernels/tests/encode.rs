//! Encoding.

use half::{bf16, f16};

use super::{all, random_f32};
use crate::{
    Cast, Format, HighPrecision, Overflow, Rounding, StochasticKey,
    kernels::{
        Isa,
        Layout::{PerElement, Segments},
        general,
        nearest::{self, Nearest},
    },
};

const SCALES: [f32; 4] = [1.0, 1.7, -0.003, 3.0e38];
/// Scales that give NaN, subnormals or only infinities.
const ODD_SCALES: [f32; 5] = [0.0, -0.0, f32::INFINITY, f32::NAN, 1.0e-40];

fn plain_casts() -> impl Iterator<Item = Cast> {
    let overflows = [Overflow::Saturate, Overflow::NonFinite];
    Format::ALL
        .into_iter()
        .flat_map(move |format| overflows.map(|mode| Cast::new(format).with_overflow(mode)))
}

pub(super) fn other_casts() -> impl Iterator<Item = Cast> {
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
        let odd = |i: usize| ODD_SCALES[i * ODD_SCALES.len() / src.len()];
        let odds: Vec<f32> = (0..src.len()).map(odd).collect();
        let oddly: Vec<u8> = src
            .iter()
            .zip(&odds)
            .map(|(x, &s)| cast.encode_scaled(x.to_f32(), s, 0))
            .collect();
        for isa in Isa::available() {
            let mut codes = vec![0x55; src.len()];
            nearest::encode::<T, false>(isa, kernel, src, PerElement, &odds, &mut codes);
            assert_codes(&cast, isa, src, &odds, &oddly, &codes);
            codes.fill(0x55);

            let max = nearest::encode::<T, true>(
                isa,
                kernel,
                src,
                Segments(src.len()),
                &[1.0],
                &mut codes,
            );
            assert_codes(&cast, isa, src, &vec![1.0; src.len()], &whole, &codes);
            assert_eq!(max, amax, "{isa:?}");

            codes.fill(0x55);
            nearest::encode::<T, false>(isa, kernel, src, Segments(100), &hundreds, &mut codes);
            assert_codes(&cast, isa, src, &scales, &scaled, &codes);

            codes.fill(0x55);
            let max = nearest::encode::<T, true>(isa, kernel, src, PerElement, &scales, &mut codes);
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
    let step = if cfg!(miri) { 17 } else { 1 };
    for cast in other_casts().step_by(step) {
        let encode = |(i, x): (usize, &f32)| cast.encode_scaled(*x, scales[i], first + i as u64);
        let expected: Vec<u8> = src.iter().enumerate().map(encode).collect();
        for isa in Isa::available() {
            let mut codes = vec![0x55; src.len()];
            general::encode::<f32, false>(
                isa,
                &cast,
                &src,
                Segments(100),
                &hundreds,
                first,
                &mut codes,
            );
            assert_codes(&cast, isa, &src, &scales, &expected, &codes);

            codes.fill(0x55);
            let max = general::encode::<f32, true>(
                isa, &cast, &src, PerElement, &scales, first, &mut codes,
            );
            assert_codes(&cast, isa, &src, &scales, &expected, &codes);
            assert!(f32::from_bits(max).is_nan());
        }
    }
}

/// A single NaN of any kind is the amax, with its bits, whatever comes before and after it.
#[test]
fn amax_has_the_bits_of_a_nan() {
    fn check<T: HighPrecision>(nans: &[T]) {
        let kernel = Nearest::new(&Cast::new(Format::E4M3)).unwrap();
        for &nan in nans {
            for place in [0, 70, 127, 129] {
                let mut src = [T::from_f32(3.0); 130];
                src[place] = nan;
                let expected = nan.to_f32().to_bits() & 0x7FFF_FFFF;
                for isa in Isa::available() {
                    let mut codes = [0; 130];
                    let max = nearest::encode::<T, true>(
                        isa,
                        kernel,
                        &src,
                        Segments(130),
                        &[1.0],
                        &mut codes,
                    );
                    assert_eq!(max, expected, "{isa:?} {place}");
                    assert_eq!(codes[place] & 0x7F, 0x7F);
                }
            }
        }
    }
    let patterns = [0x7F80_0001, 0x7FC0_0000, 0x7FFF_FFFF, 0xFFA0_0000u32];
    check(&patterns.map(f32::from_bits));
    check(&[0x7F81, 0x7FC0, 0xFFFF, 0xFFA0].map(bf16::from_bits));
    check(&[0x7C01, 0x7E00, 0xFFFF, 0xFD00].map(f16::from_bits));
}

/// Whatever makes a product NaN, its code has the sign bit of the value.
#[test]
fn the_sign_of_a_nan_code_is_that_of_the_value() {
    fn check<T: HighPrecision>(values: &[(T, bool)]) {
        const LEN: usize = 70;
        let scales = [
            (f32::NAN, true),
            (-f32::NAN, true),
            (f32::from_bits(0xFF80_0001), true),
            (0.0, false),
            (-0.0, false),
            (-3.0, false),
            (2.0, false),
        ];
        let step = if cfg!(miri) { 17 } else { 1 };
        for cast in plain_casts().chain(other_casts()).step_by(step) {
            for &(value, negative) in values {
                for (scale, is_nan) in scales {
                    // An infinity times anything but 0 and NaN has the sign of the product.
                    if !value.to_f32().is_nan() && !is_nan && scale != 0.0 {
                        continue;
                    }
                    let nan = match (cast.format.has_negative_zero(), negative) {
                        (false, _) => 0x80,
                        (true, false) => 0x7F,
                        (true, true) => 0xFF,
                    };
                    let what = format!("{cast:?} {negative} {:#x}", scale.to_bits());
                    let defined = cast.encode_scaled(value.to_f32(), scale, 0);
                    assert_eq!(defined, nan, "{what}");
                    let mut src = [T::from_f32(1.0); LEN];
                    src[3] = value;
                    src[LEN - 2] = value;
                    let each = [scale; LEN];
                    for isa in Isa::available() {
                        let mut codes = [[0; LEN]; 4];
                        let [a, b, c, d] = &mut codes;
                        let one = &each[..1];
                        general::encode::<T, false>(isa, &cast, &src, Segments(LEN), one, 0, a);
                        general::encode::<T, true>(isa, &cast, &src, PerElement, &each, 0, b);
                        if let Some(kernel) = Nearest::new(&cast) {
                            nearest::encode::<T, true>(isa, kernel, &src, Segments(LEN), one, c);
                            nearest::encode::<T, false>(isa, kernel, &src, PerElement, &each, d);
                        } else {
                            (*c, *d) = (*a, *b);
                        }
                        for codes in codes {
                            assert_eq!([codes[3], codes[LEN - 2]], [nan; 2], "{isa:?} {what}");
                        }
                    }
                }
            }
        }
    }
    let with_signs = |bits: [u32; 5]| bits.map(|bits| (bits, bits >> 31 == 1));
    let f32s = with_signs([
        0x7FC0_0000,
        0xFFC0_0000,
        0x7F80_0001,
        0xFFFF_FFFF,
        0xFF80_0000,
    ]);
    check(&f32s.map(|(bits, negative)| (f32::from_bits(bits), negative)));
    check(&f32s.map(|(bits, negative)| {
        // The payload, shifted to where f64 has it, and one more bit than f32 can hold.
        let payload = u64::from(bits & 0x007F_FFFF);
        let bits = u64::from(bits >> 31) << 63 | 0x7FF << 52 | payload << 29 | payload & 1;
        (f64::from_bits(bits), negative)
    }));
    let bf16s = [0x7FC0, 0xFFC0, 0x7F81, 0xFFFF, 0xFF80];
    check(&bf16s.map(|bits| (bf16::from_bits(bits), bits >> 15 == 1)));
    let f16s = [0x7E00, 0xFE00, 0x7C01, 0xFFFF, 0xFC00];
    check(&f16s.map(|bits| (f16::from_bits(bits), bits >> 15 == 1)));
}

/// Every length up to some blocks and every short segment, starting at every place within four random words, with NaN
/// and infinities among the values, in a longer buffer.
#[test]
fn casts_keep_to_their_length_and_place() {
    fn check<T: HighPrecision>() {
        let src: Vec<T> = random_f32(400).into_iter().rev().map(T::from_f32).collect();
        let key = StochasticKey {
            seed: 11,
            ..Default::default()
        };
        let stochastic = Cast::new(Format::E5M2).with_rounding(Rounding::Stochastic(key));
        let casts = [
            Cast::new(Format::E4M3),
            Cast::new(Format::E5M2Fnuz),
            stochastic,
            stochastic.with_overflow(Overflow::NonFinite),
        ];
        let step = if cfg!(miri) { 37 } else { 1 };
        let lengths = (0..200).step_by(step).map(|len| (len, len.max(1)));
        let segments = (1..150).step_by(step).map(|len| (400, len));
        for (count, len) in lengths.chain(segments) {
            let src = &src[..count];
            let first = (1 << 40) + (count + len) as u64;
            let scale_of = |i: usize| SCALES[i / len % 4];
            let scales: Vec<f32> = (0..count.div_ceil(len)).map(|i| SCALES[i % 4]).collect();
            let each: Vec<f32> = (0..count).map(scale_of).collect();
            let amax = src.iter().map(|x| x.to_f32().to_bits() & 0x7FFF_FFFF).max();
            for cast in casts {
                let code =
                    |i: usize| cast.encode_scaled(src[i].to_f32(), scale_of(i), first + i as u64);
                let expected: Vec<u8> = (0..count).map(code).collect();
                for isa in Isa::available() {
                    let mut codes = vec![0x55; count + 70];
                    let now = &mut codes[..count];
                    let (by_segment, by_column) = if let Some(kernel) = Nearest::new(&cast) {
                        let a = nearest::encode::<T, true>(
                            isa,
                            kernel,
                            src,
                            Segments(len),
                            &scales,
                            now,
                        );
                        assert_codes(&cast, isa, src, &each, &expected, now);
                        now.fill(0);
                        let b =
                            nearest::encode::<T, true>(isa, kernel, src, PerElement, &each, now);
                        (a, b)
                    } else {
                        let (cast, scales, each) = (&cast, &scales, &each);
                        let a = general::encode::<T, true>(
                            isa,
                            cast,
                            src,
                            Segments(len),
                            scales,
                            first,
                            now,
                        );
                        assert_codes(cast, isa, src, each, &expected, now);
                        now.fill(0);
                        let b = general::encode::<T, true>(
                            isa, cast, src, PerElement, each, first, now,
                        );
                        (a, b)
                    };
                    assert_codes(&cast, isa, src, &each, &expected, now);
                    assert_eq!(Some(by_segment), amax.or(Some(0)), "{isa:?} {count} {len}");
                    assert_eq!(Some(by_column), amax.or(Some(0)), "{isa:?} {count} {len}");
                    assert!(
                        codes[count..].iter().all(|&code| code == 0x55),
                        "{isa:?} {count}"
                    );
                }
            }
        }
    }
    check::<f32>();
    check::<bf16>();
    check::<f16>();
    check::<f64>();
}

/// Every pattern of the 16-bit types, under stochastic rounding.
#[test]
fn stochastic_rounding_of_all_bf16_and_f16_equals_the_definition() {
    fn check<T: HighPrecision>(src: Vec<T>) {
        let key = StochasticKey {
            seed: 5 << 33 | 1,
            step: 8,
            tensor: 4,
        };
        for cast in plain_casts().map(|cast| cast.with_rounding(Rounding::Stochastic(key))) {
            for scale in [1.0, -77.0, 1e-30, 0.0, f32::INFINITY] {
                let code = |(i, x): (usize, &T)| cast.encode_scaled(x.to_f32(), scale, i as u64);
                let expected: Vec<u8> = src.iter().enumerate().map(code).collect();
                for isa in Isa::available() {
                    let mut codes = vec![0; src.len()];
                    let scales = [scale];
                    general::encode::<T, false>(
                        isa,
                        &cast,
                        &src,
                        Segments(src.len()),
                        &scales,
                        0,
                        &mut codes,
                    );
                    assert_codes(&cast, isa, &src, &vec![scale; src.len()], &expected, &codes);
                }
            }
        }
    }
    check(all(bf16::from_bits));
    check(all(f16::from_bits));
}
