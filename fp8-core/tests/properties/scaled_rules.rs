//! The rules of scaled arithmetic depend on ratios of scales alone, keep values, and keep scales in range.

use fp8_core::E8M0;
use fp8_core::scaled::{
    Aligned, Factored, Pow2Rounding, Scale, ScaleCheck, ScaledError, add_rule, constant_rule,
    div_rule, extreme_rule, matmul_rule, mean_rule, mul_rule, powi_rule, rescale_factor,
    rescale_norm, rsqrt_rule, sqrt_rule, sum_rule,
};
use proptest::prelude::*;

const DOWN: Pow2Rounding = Pow2Rounding::Down;

/// What a scale and a factor, both rounded to f32, can be off together.
const TWO_ROUNDINGS: f64 = f32::EPSILON as f64;

fn scale(exponent: i32) -> Scale {
    Scale::power_of_two(exponent)
}

fn value(scale: Scale) -> f64 {
    scale.to_f32().into()
}

/// The value of a factored result per unit of data.
fn worth(rule: Factored) -> f64 {
    value(rule.scale) * f64::from(rule.data_factor)
}

fn roundings() -> impl Strategy<Value = (Pow2Rounding, u32)> {
    let rounding = prop_oneof![
        Just(Pow2Rounding::None),
        Just(Pow2Rounding::Down),
        Just(Pow2Rounding::Up),
        Just(Pow2Rounding::Stochastic)
    ];
    (rounding, any::<u32>())
}

proptest! {
    /// Multiplying an input by 2^k changes scales by powers of 2^k, and no data factor.
    #[test]
    fn only_ratios_count(
        a in -30..30i32,
        b in -30..30i32,
        k in -20..20i32,
        length in 1..100_000usize,
        (rounding, word) in roundings(),
    ) {
        let round = rounding.of_word(word);
        let both = |rule: &dyn Fn(Scale, Scale) -> (Scale, Vec<f32>), power: i32| {
            let (before, factors) = rule(scale(a), scale(b));
            let (after, factors_after) = rule(scale(a + k), scale(b + k));
            prop_assert_eq!(factors, factors_after);
            prop_assert_eq!(value(after), value(before) * 2f64.powi(power * k));
            Ok(())
        };
        let aligned = |rule: Aligned| (rule.scale, rule.data_factors.to_vec());
        let factored = |rule: Factored| (rule.scale, vec![rule.data_factor]);
        both(&|a, b| aligned(add_rule(a, b, round)), 1)?;
        both(&|a, b| aligned(extreme_rule(a, b)), 1)?;
        both(&|a, b| factored(mul_rule(a, b)), 2)?;
        both(&|a, b| factored(div_rule(a, b).unwrap()), 0)?;
        both(&|a, b| factored(matmul_rule(a, b, length, round)), 2)?;
        both(&|a, _| factored(sum_rule(a, length, round)), 1)?;
        both(&|a, _| factored(mean_rule(a, length, round)), 1)?;
        both(&|a, _| factored(powi_rule(a, 1).unwrap()), 1)?;
        both(&|a, _| factored(powi_rule(a, -1).unwrap()), -1)?;
        // A root depends on the parity of the exponent.
        let four = |rule: fn(Scale) -> Factored| (rule(scale(a)), rule(scale(a + 2 * k)));
        let (before, after) = four(sqrt_rule);
        prop_assert_eq!(before.data_factor, after.data_factor);
        prop_assert_eq!(value(after.scale), value(before.scale) * 2f64.powi(k));
        let (before, after) = four(|s| rsqrt_rule(s).unwrap());
        prop_assert_eq!(before.data_factor, after.data_factor);
        prop_assert_eq!(value(after.scale), value(before.scale) * 2f64.powi(-k));
    }

    /// Within the range scales are powers of two, and the value is that of the operation.
    #[test]
    fn values_are_kept(a in -60..60i32, b in -60..60i32, length in 1..1_000_000usize) {
        let round = DOWN.of_word(0);
        let (sa, sb) = (scale(a), scale(b));
        prop_assert_eq!(worth(mul_rule(sa, sb)), value(sa) * value(sb));
        prop_assert_eq!(worth(div_rule(sa, sb).unwrap()), value(sa) / value(sb));
        prop_assert_eq!(worth(matmul_rule(sa, sb, length, round)), value(sa) * value(sb));
        prop_assert_eq!(worth(sum_rule(sa, length, round)), value(sa));
        let mean = worth(mean_rule(sa, length, round)) * length as f64 / value(sa);
        prop_assert!((mean - 1.0).abs() <= TWO_ROUNDINGS, "{}", mean);
        for rule in [add_rule(sa, sb, round), extreme_rule(sa, sb)] {
            prop_assert_eq!(rule.scale, scale(a.max(b)));
            let [ka, kb] = rule.data_factors.map(f64::from);
            prop_assert_eq!([ka * value(rule.scale), kb * value(rule.scale)], [value(sa), value(sb)]);
        }
        let root = sqrt_rule(sa);
        prop_assert!([1.0, 2.0].contains(&root.data_factor));
        prop_assert_eq!(value(root.scale).powi(2) * f64::from(root.data_factor), value(sa));
        let inverse = rsqrt_rule(sa).unwrap();
        prop_assert!([1.0, 0.5].contains(&inverse.data_factor));
        prop_assert_eq!(value(inverse.scale).powi(2), value(sa).recip() * f64::from(inverse.data_factor));
        for rule in [mul_rule(sa, sb), matmul_rule(sa, sb, length, round), root, inverse] {
            prop_assert!(rule.scale.is_power_of_two());
        }
    }

    /// Beyond the range the scale is the nearest possible one, and the data factor holds the rest.
    #[test]
    fn scales_are_held_in_range(a in -126..=127i32, b in -126..=127i32, exponent in -9..9i32) {
        for (rule, exact) in [
            (mul_rule(scale(a), scale(b)), a + b),
            (div_rule(scale(a), scale(b)).unwrap(), a - b),
            (powi_rule(scale(a), exponent).unwrap(), a * exponent),
        ] {
            prop_assert_eq!(rule.scale, scale(exact));
            let rest = exact - exact.clamp(-126, 127);
            prop_assert_eq!(rule.data_factor, 2f64.powi(rest) as f32);
        }
    }

    #[test]
    fn the_larger_scale_or_what_is_above_it(a in -30..30i32, b in -30..30i32, word: u32) {
        let size = (value(scale(a)).powi(2) + value(scale(b)).powi(2)).sqrt();
        let of = |rounding: Pow2Rounding| value(add_rule(scale(a), scale(b), rounding.of_word(word)).scale);
        prop_assert!((of(Pow2Rounding::None) / size - 1.0).abs() <= TWO_ROUNDINGS);
        let (down, up) = (of(Pow2Rounding::Down), of(Pow2Rounding::Up));
        prop_assert!(down <= size * (1.0 + TWO_ROUNDINGS) && size < 2.0 * down);
        prop_assert!(up == 2.0 * down || up == down && size <= down * (1.0 + TWO_ROUNDINGS));
        prop_assert!([down, up].contains(&of(Pow2Rounding::Stochastic)));
    }

    #[test]
    fn a_constant_is_its_parts(mantissa in 1f64..2.0, exponent in -126..127i32, negative: bool) {
        let constant = mantissa * 2f64.powi(exponent) * if negative { -1.0 } else { 1.0 };
        let (power, mantissa) = constant_rule(constant);
        prop_assert!(power.is_power_of_two());
        prop_assert!((1.0..2.0).contains(&mantissa.abs()));
        let back = value(power) * f64::from(mantissa);
        prop_assert!((back / constant - 1.0).abs() <= f64::from(f32::EPSILON) / 2.0);
    }

    #[test]
    fn a_norm_becomes_a_power_of_two(norm in 0f32..1e30) {
        let factor = rescale_norm(norm);
        prop_assert!(Scale::new(factor).is_ok());
        prop_assert!(factor == 2f32.powi(-14) && norm < 2f32.powi(-13) || factor <= norm && norm < 2.0 * factor);
    }
}

#[test]
fn lengths_round_as_the_mode_says() {
    let of = |rounding: Pow2Rounding, length| {
        let rule = sum_rule(Scale::ONE, length, rounding.of_word(0));
        assert!((worth(rule) - 1.0).abs() <= TWO_ROUNDINGS);
        rule.scale.to_f32()
    };
    for (length, down, up) in [
        (1, 1.0, 1.0),
        (2, 1.0, 2.0),
        (4, 2.0, 2.0),
        (10, 2.0, 4.0),
        (16, 4.0, 4.0),
    ] {
        assert_eq!(of(Pow2Rounding::Down, length), down, "{length}");
        // An exact power stays; the original library doubles it.
        assert_eq!(of(Pow2Rounding::Up, length), up, "{length}");
    }
    assert_eq!(of(Pow2Rounding::None, 9), 3.0);
    assert_eq!(of(Pow2Rounding::Down, 0), 1.0);
}

/// P(up) is the distance from the power below: over all words that is exact.
#[test]
fn stochastic_rounding_has_the_mean_of_the_factor() {
    for factor in [1.0f32, 1.25, 3.0, 5.0, 7.75] {
        let words = 1 << 12;
        let up = |word: u32| Pow2Rounding::Stochastic.of_word(word << 20).round(factor);
        let mean: f64 = (0..words).map(|word| f64::from(up(word))).sum::<f64>() / f64::from(words);
        assert_eq!(mean, f64::from(factor), "{factor}");
    }
    // A square root has all its digits; 4096 words resolve it to 2^-12 of the gap.
    let factor = 10f32.sqrt();
    let of = |word: u32| f64::from(Pow2Rounding::Stochastic.of_word(word << 20).round(factor));
    let mean = (0..4096).map(of).sum::<f64>() / 4096.0;
    assert!((mean - f64::from(factor)).abs() <= 2.0 / 4096.0, "{mean}");
}

#[test]
fn a_zero_scale_is_that_of_zeros() {
    let (zero, two) = (Scale::ZERO, scale(1));
    let round = DOWN.of_word(0);
    for rule in [add_rule(zero, two, round), extreme_rule(zero, two)] {
        assert_eq!((rule.scale, rule.data_factors), (two, [0.0, 1.0]));
    }
    let none = add_rule(zero, zero, round);
    assert_eq!((none.scale, none.data_factors), (zero, [0.0, 0.0]));
    assert!(mul_rule(zero, two).scale.is_zero());
    assert!(matmul_rule(two, zero, 9, round).scale.is_zero());
    assert!(sum_rule(zero, 9, round).scale.is_zero());
    assert!(mean_rule(zero, 9, round).scale.is_zero());
    assert!(sqrt_rule(zero).scale.is_zero());
    assert!(powi_rule(zero, 3).is_ok_and(|rule| rule.scale.is_zero()));
    assert!(powi_rule(zero, 0).is_ok_and(|rule| rule.scale == Scale::ONE));
    assert_eq!(rescale_factor(zero, two), 0.0);
    assert_eq!(constant_rule(0.0), (zero, 0.0));
    assert_eq!(div_rule(two, zero), Err(ScaledError::Zero { op: "div" }));
    assert_eq!(rsqrt_rule(zero), Err(ScaledError::Zero { op: "rsqrt" }));
    assert_eq!(powi_rule(zero, -1), Err(ScaledError::Zero { op: "powi" }));
}

#[test]
fn what_is_a_scale() {
    for got in [3.0, 0.75, 0.0, 1e-40, f32::MAX] {
        assert_eq!(Scale::new(got), Err(ScaledError::NotPowerOfTwo { got }));
        assert!(ScaleCheck::Lenient.check(got).is_ok());
    }
    for check in [ScaleCheck::Strict, ScaleCheck::Lenient] {
        assert_eq!(check.check(-2.0), Err(ScaledError::Negative { got: -2.0 }));
        let infinite = check.check(f32::INFINITY);
        assert_eq!(infinite, Err(ScaledError::NotFinite { got: f32::INFINITY }));
        let nan = check.check(f32::NAN);
        assert!(matches!(nan, Err(ScaledError::NotFinite { got }) if got.is_nan()));
    }
    for exponent in -126..=127 {
        let scale = Scale::new(2f64.powi(exponent) as f32).unwrap();
        assert_eq!(scale.exponent(), Some(exponent));
        assert_eq!(scale, Scale::power_of_two(exponent));
    }
}

#[test]
fn every_scale_has_its_e8m0_code() {
    for exponent in -126..=127 {
        let scale = scale(exponent);
        let code = scale.to_e8m0().unwrap();
        assert_eq!(code.exponent(), Some(exponent));
        assert_eq!(Scale::from_e8m0(code), Ok((scale, 1.0)));
    }
    for got in [0.0, 3.0] {
        let scale = Scale::lenient(got).unwrap();
        assert_eq!(scale.to_e8m0(), Err(ScaledError::NoE8m0 { got }));
    }
    for bits in 0..=u8::MAX {
        let code = E8M0::from_bits(bits);
        match (code.exponent(), Scale::from_e8m0(code)) {
            (Some(exponent), Ok((scale, rest))) => {
                assert_eq!(value(scale) * f64::from(rest), 2f64.powi(exponent));
            }
            (None, Err(ScaledError::NotFinite { .. })) => assert_eq!(bits, 255),
            other => panic!("{bits}: {other:?}"),
        }
    }
}
