//! Properties of every cast, on any input.

use fp8_core::{
    Cast, E4M3, E4M3Fnuz, E5M2, E5M2Fnuz, E8M0, Format, Overflow, Rounding, StochasticKey,
};
use proptest::prelude::*;

const DETERMINISTIC: [Rounding; 5] = [
    Rounding::NearestEven,
    Rounding::NearestAway,
    Rounding::TowardZero,
    Rounding::TowardPositive,
    Rounding::TowardNegative,
];

fn formats() -> impl Strategy<Value = Format> {
    prop::sample::select(Format::ALL.to_vec())
}

/// A value within the range of the format or just beyond, of any order of magnitude, including ties.
fn near(format: Format) -> impl Strategy<Value = f32> {
    let codes = (0..=format.max_code(), any::<bool>(), 0..=16u32).prop_map(
        move |(code, negative, sixteenths)| {
            let low = format.decode(code);
            let high = if code == format.max_code() {
                low * 1.25
            } else {
                format.decode(code + 1)
            };
            let x = low + (high - low) * sixteenths as f32 / 16.0;
            if negative { -x } else { x }
        },
    );
    let exponents = (0..=40u32, any::<u32>()).prop_map(move |(down, fraction)| {
        let top = format.max().to_bits() >> 23;
        f32::from_bits((top - down) << 23 | fraction & 0x807F_FFFF)
    });
    prop_oneof![codes, exponents]
}

fn with_value() -> impl Strategy<Value = (Format, f32)> {
    formats().prop_flat_map(|format| (Just(format), near(format)))
}

/// The finite values of a format, in order.
fn finite_values(format: Format) -> Vec<f32> {
    let finite = (0..=255).filter(|&code| format.is_finite(code));
    let mut values: Vec<f32> = finite.map(|code| format.decode(code)).collect();
    values.sort_by(f32::total_cmp);
    values
}

fn neighbours(format: Format, x: f32) -> (f32, f32) {
    let values = finite_values(format);
    let below = values
        .iter()
        .copied()
        .filter(|value| *value <= x)
        .fold(-format.max(), f32::max);
    let above = values
        .iter()
        .copied()
        .filter(|value| *value >= x)
        .fold(format.max(), f32::min);
    (below, above)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn every_bit_pattern_has_a_code(bits: u32, format in formats(), step: u32, element: u64, via_f16: bool) {
        let x = f32::from_bits(bits);
        let stochastic = Rounding::Stochastic(StochasticKey { step, ..Default::default() });
        for rounding in DETERMINISTIC.into_iter().chain([stochastic]) {
            for overflow in [Overflow::Saturate, Overflow::NonFinite] {
                let cast = Cast::new(format).with_rounding(rounding).with_overflow(overflow).with_via_f16(via_f16);
                let value = cast.round(x, element);
                if x.is_nan() {
                    prop_assert!(value.is_nan());
                } else if overflow == Overflow::Saturate {
                    prop_assert!(value.is_finite());
                }
                if !value.is_nan() && value != 0.0 {
                    prop_assert_eq!(value.is_sign_negative(), x.is_sign_negative());
                }
            }
        }
    }

    #[test]
    fn rounding_is_monotone((format, x) in with_value(), other: u32) {
        let y = f32::from_bits(other & 0xFFFF | x.to_bits() & 0xFFFF_0000);
        for rounding in DETERMINISTIC {
            let cast = Cast::new(format).with_rounding(rounding);
            if x <= y {
                prop_assert!(cast.round(x, 0) <= cast.round(y, 0), "{:?} {:e} {:e}", rounding, x, y);
            } else {
                prop_assert!(cast.round(x, 0) >= cast.round(y, 0), "{:?} {:e} {:e}", rounding, x, y);
            }
        }
    }

    #[test]
    fn nearest_is_nearest((format, x) in with_value()) {
        let (below, above) = neighbours(format, x);
        let even = Cast::new(format).round(x, 0);
        let away = Cast::new(format).with_rounding(Rounding::NearestAway).round(x, 0);
        let distance = |value: f32| (f64::from(value) - f64::from(x)).abs();
        let least = distance(below).min(distance(above));
        prop_assert_eq!(distance(even), least, "{:e} gives {:e}", x, even);
        prop_assert_eq!(distance(away), least, "{:e} gives {:e}", x, away);
        if distance(below) == distance(above) && below != above {
            prop_assert_eq!(Cast::new(format).encode(x, 0) & 1, 0, "the tie {:e}", x);
            prop_assert_eq!(away.abs(), below.abs().max(above.abs()), "the tie {:e}", x);
        }
    }

    #[test]
    fn directed_modes_bracket((format, x) in with_value()) {
        let (below, above) = neighbours(format, x);
        let round = |rounding| Cast::new(format).with_rounding(rounding).round(x, 0);
        prop_assert_eq!(round(Rounding::TowardNegative), below);
        prop_assert_eq!(round(Rounding::TowardPositive), above);
        prop_assert_eq!(round(Rounding::TowardZero), if x < 0.0 { above } else { below });
    }

    #[test]
    fn directed_modes_do_not_overflow_toward_zero(format in formats(), factor in 1.0f32..1e30) {
        let x = format.max() * factor * 1.5;
        let round = |rounding, x| Cast::new(format).with_rounding(rounding).with_overflow(Overflow::NonFinite).round(x, 0);
        prop_assert_eq!(round(Rounding::TowardZero, x), format.max());
        prop_assert_eq!(round(Rounding::TowardZero, -x), -format.max());
        prop_assert_eq!(round(Rounding::TowardNegative, x), format.max());
        prop_assert_eq!(round(Rounding::TowardPositive, -x), -format.max());
        prop_assert!(!round(Rounding::TowardPositive, x).is_finite());
        prop_assert!(!round(Rounding::TowardNegative, -x).is_finite());
    }

    /// The code away from zero is taken exactly if the word of the element is below the fraction.
    #[test]
    fn stochastic_takes_the_exact_fraction((format, x) in with_value(), seed: u64, step: u32, tensor: u32, element: u64) {
        let key = StochasticKey { seed, step, tensor };
        let value = Cast::new(format).with_rounding(Rounding::Stochastic(key)).round(x, element);
        let (below, above) = neighbours(format, x.abs());
        if below == above || x.abs() > format.max() {
            prop_assert_eq!(value.abs(), below.min(format.max()));
        } else {
            // Both differences are exact in f64, and so is their quotient: the gap is a power of two.
            let fraction = (f64::from(x.abs()) - f64::from(below)) / (f64::from(above) - f64::from(below));
            let away = f64::from(key.word(element)) < (fraction * 2f64.powi(32)).floor();
            prop_assert_eq!(value.abs(), if away { above } else { below }, "{:e}", x);
        }
    }
}

#[test]
fn encoding_a_decoded_code_gives_it_back() {
    for format in Format::ALL {
        for code in (0..=255).filter(|&code| !format.is_nan(code)) {
            let x = format.decode(code);
            let stochastic = Rounding::Stochastic(StochasticKey::default());
            for rounding in DETERMINISTIC.into_iter().chain([stochastic]) {
                for via_f16 in [false, true] {
                    let cast = Cast::new(format)
                        .with_rounding(rounding)
                        .with_via_f16(via_f16);
                    let cast = cast.with_overflow(Overflow::NonFinite);
                    assert_eq!(cast.encode(x, u64::from(code)), code, "{cast:?} {x:e}");
                }
            }
        }
    }
}

#[test]
fn nan_and_zero_keep_their_sign_where_there_are_two() {
    for format in Format::ALL {
        let cast = Cast::new(format);
        let two = format.has_negative_zero();
        assert_eq!(
            cast.encode(f32::NAN, 0),
            if two { 0x7F } else { 0x80 },
            "{format}"
        );
        assert_eq!(
            cast.encode(-f32::NAN, 0),
            if two { 0xFF } else { 0x80 },
            "{format}"
        );
        assert_eq!(cast.encode(-0.0, 0), if two { 0x80 } else { 0 }, "{format}");
        assert_eq!(
            cast.encode(-1e-30, 0),
            if two { 0x80 } else { 0 },
            "{format}"
        );
        assert_eq!(
            cast.encode_scaled(f32::INFINITY, 0.0, 0),
            if two { 0x7F } else { 0x80 },
            "{format}"
        );
        assert_eq!(
            cast.encode_scaled(f32::NEG_INFINITY, 0.0, 0),
            if two { 0xFF } else { 0x80 },
            "{format}"
        );
    }
}

/// A quotient in f32 is another number than the product with the reciprocal in f32, which matters at ties.
#[test]
fn a_tie_of_quotients_stays_a_tie() {
    let (cast, x, scale) = (Cast::new(Format::E4M3), -0.79296875, 0.0068359375);
    let value = |code| Format::E4M3.decode(code);
    assert_eq!(value(cast.encode_divided(x, scale, 0)), -112.0); // -116, between -112 and -120
    assert_eq!(value(cast.encode_scaled(x, 1.0 / scale, 0)), -120.0);
}

#[test]
fn overflow_is_decided_after_rounding() {
    let non_finite = |format, x| {
        Cast::new(format)
            .with_overflow(Overflow::NonFinite)
            .round(x, 0)
    };
    assert_eq!(non_finite(Format::E4M3, 464.0), 448.0);
    assert!(non_finite(Format::E4M3, 464.0f32.next_up()).is_nan());
    assert_eq!(non_finite(Format::E5M2, 61440.0f32.next_down()), 57344.0);
    assert_eq!(non_finite(Format::E5M2, 61440.0), f32::INFINITY);
    assert!(non_finite(Format::E4M3Fnuz, 248.0).is_nan());
    assert_eq!(non_finite(Format::E4M3Fnuz, 248.0f32.next_down()), 240.0);
    assert!(non_finite(Format::E5M2Fnuz, f32::NEG_INFINITY).is_nan());
    assert_eq!(Cast::new(Format::E4M3).round(2f32.powi(-10), 0), 0.0);
}

/// The mean over many draws is the value, subnormals included, within six standard deviations.
#[test]
fn the_stochastic_mean_is_the_value() {
    const DRAWS: u64 = 40_000;
    for format in Format::ALL {
        let step = format.min_subnormal();
        for (tensor, x) in [
            0.3 * step,
            0.03 * step,
            -2.7 * step,
            1.1 * format.min_normal(),
            1.03,
            -3.9,
            0.93 * format.max(),
        ]
        .into_iter()
        .enumerate()
        {
            let key = StochasticKey {
                seed: 11,
                step: 3,
                tensor: tensor as u32,
            };
            let cast = Cast::new(format).with_rounding(Rounding::Stochastic(key));
            let sum: f64 = (0..DRAWS)
                .map(|element| f64::from(cast.round(x, element)))
                .sum();
            let (below, above) = neighbours(format, x);
            let gap = f64::from(above) - f64::from(below);
            let fraction = (f64::from(x) - f64::from(below)) / gap;
            let deviation = gap * (fraction * (1.0 - fraction) / DRAWS as f64).sqrt();
            let error = sum / DRAWS as f64 - f64::from(x);
            assert!(
                error.abs() <= 6.0 * deviation,
                "{format} {x:e}: off by {error:e}, deviation {deviation:e}"
            );
        }
    }
}

#[test]
fn stochastic_bits_depend_on_every_part_of_the_key() {
    let key = StochasticKey {
        seed: 1,
        step: 2,
        tensor: 3,
    };
    let words = |key: StochasticKey| (0..8).map(|element| key.word(element)).collect::<Vec<_>>();
    for other in [
        StochasticKey { seed: 2, ..key },
        StochasticKey {
            seed: 1 | 1 << 32,
            ..key
        },
        StochasticKey { step: 3, ..key },
        StochasticKey { tensor: 4, ..key },
    ] {
        assert!(words(key).iter().zip(words(other)).all(|(a, b)| *a != b));
    }
    assert_ne!(key.word(5), key.word(5 + (1 << 34)));
    assert_eq!(key.block(1)[1], key.word(5));
}

#[test]
fn newtypes_carry_the_constants_of_their_format() {
    macro_rules! check {
        ($($name:ident)+) => {$(
            let format = $name::FORMAT;
            assert_eq!($name::MAX.to_f32(), format.max());
            assert_eq!($name::MIN.to_f32(), -format.max());
            assert_eq!($name::MIN_POSITIVE.to_f32(), format.min_normal());
            assert_eq!($name::MIN_POSITIVE_SUBNORMAL.to_f32(), format.min_subnormal());
            assert_eq!($name::EPSILON.to_f32(), format.epsilon());
            assert_eq!($name::ONE.to_f32(), 1.0);
            assert_eq!($name::ONE.to_bits() + 1, $name::from_f32(1.0 + format.epsilon()).to_bits());
            assert!($name::NAN.is_nan() && $name::NAN != $name::NAN && !$name::NAN.is_finite());
            assert!($name::MIN < $name::ZERO && $name::MIN.is_sign_negative() && $name::ZERO.is_sign_positive());
            assert_eq!($name::from_f32(1e9), $name::MAX);
            assert_eq!(format!("{:?} {}", $name::ONE, $name::from_f32(-1.5)), concat!(stringify!($name), "(1.0) -1.5"));
            for code in 0..=255 {
                let value = $name::from_bits(code);
                let same = |other: f32| other == value.to_f32() || value.is_nan() && other.is_nan();
                assert!(same(half::bf16::from(value).to_f32()) && same(half::f16::from(value).to_f32()));
                assert!(same(f64::from(value) as f32) && same(f32::from(value)));
            }
        )+};
    }
    check!(E4M3 E5M2 E4M3Fnuz E5M2Fnuz);
    assert!(E5M2::INFINITY.is_infinite() && E5M2::NEG_INFINITY < E5M2::MIN);
    assert_eq!(E4M3::from_bits(0x80), E4M3::ZERO);
    let limits = |format: Format| {
        (
            format.max(),
            format.min_normal(),
            format.min_subnormal(),
            format.bias(),
            format.max_exponent(),
        )
    };
    assert_eq!(
        limits(Format::E4M3),
        (448.0, 2f32.powi(-6), 2f32.powi(-9), 7, 8)
    );
    assert_eq!(
        limits(Format::E5M2),
        (57344.0, 2f32.powi(-14), 2f32.powi(-16), 15, 15)
    );
    assert_eq!(
        limits(Format::E4M3Fnuz),
        (240.0, 2f32.powi(-7), 2f32.powi(-10), 8, 7)
    );
    assert_eq!(
        limits(Format::E5M2Fnuz),
        (57344.0, 2f32.powi(-15), 2f32.powi(-17), 16, 15)
    );
}

#[test]
fn e8m0_is_a_power_of_two() {
    for code in 0..=254 {
        let value = E8M0::from_bits(code);
        assert_eq!(f64::from(value), 2f64.powi(i32::from(code) - 127));
        assert_eq!(E8M0::from_f32(value.to_f32()), value);
        assert_eq!(f64::from(value.reciprocal()), 1.0 / f64::from(value));
    }
    assert!(E8M0::NAN.is_nan() && E8M0::NAN.to_f32().is_nan() && E8M0::NAN.reciprocal().is_nan());
    assert_eq!(
        format!("{:?} {}", E8M0::from_bits(130), E8M0::ONE),
        "E8M0(2^3) 1"
    );
}
