//! Scales from amaxes and histories.

use crate::common::word;
use fp8_core::{
    AMAX_EPSILON, AmaxCompute, CustomAmax, DelayedRule, E8M0, Format, ScaleError, ScaleRounding,
    SlotUpdate, current_quant_scale, delayed_quant_scale, dynamic_quant_scale,
    floor_to_power_of_two, mx_dequant_scale_floor, mx_dequant_scale_rceil, reciprocal,
    resize_history, static_dequant_scale, update_slot,
};
use proptest::prelude::*;

/// Finite amaxes of any order of magnitude.
fn amaxes(count: u32) -> impl Iterator<Item = f32> {
    (0..count).map(|index| f32::from_bits(word(3, index) % 0x7F80_0000))
}

/// torchao computes in f64 and rounds at the end.
#[test]
fn inference_divides_by_the_rounded_dequant_scale() {
    use fp8_core::{inference_dequant_scale, inference_quant_scale};
    let format = Format::E4M3;
    let mut differing = 0;
    for i in 1..100_000u32 {
        let amax = i as f32 * 0.37;
        let scale = inference_quant_scale(amax, format);
        let dequant_scale = inference_dequant_scale(amax, format);
        assert_eq!(dequant_scale.to_bits(), (amax / 448.0).to_bits());
        assert_eq!(scale.to_bits(), (1.0 / dequant_scale).to_bits());
        let exact = 448.0 / f64::from(amax);
        // Two roundings, half an ulp each.
        assert!(
            (f64::from(scale) / exact - 1.0).abs() <= 2.0 * f64::from(f32::EPSILON) / 2.0 * 1.01
        );
        differing += usize::from(scale != dynamic_quant_scale(amax, format));
    }
    assert!(differing > 0, "the two rules would be one");
    assert_eq!(inference_quant_scale(0.0, format), 1.0 / (1e-12f32 / 448.0));
    assert_eq!(inference_quant_scale(f32::INFINITY, format), 0.0);
    assert!(inference_quant_scale(f32::NAN, format).is_nan());
    assert_eq!(inference_dequant_scale(0.0, format), 1e-12 / 448.0);
    assert_eq!(
        inference_dequant_scale(f32::INFINITY, format),
        f32::INFINITY
    );
    assert!(inference_dequant_scale(f32::NAN, format).is_nan());
}

#[test]
fn plain_division_equals_the_detour_through_f64() {
    let around = (0..1000u32)
        .flat_map(|step| [AMAX_EPSILON.to_bits() - step, AMAX_EPSILON.to_bits() + step]);
    for amax in amaxes(200_000)
        .chain(around.map(f32::from_bits))
        .chain([0.0, f32::MAX])
    {
        for format in Format::ALL {
            let expected = (f64::from(format.max()) / f64::from(amax).max(1e-12)) as f32;
            assert_eq!(
                dynamic_quant_scale(amax, format),
                expected,
                "{format} {amax:e}"
            );
            let expected = (1.0 / f64::from(amax)) as f32;
            assert_eq!(reciprocal(amax), expected, "{amax:e}");
        }
    }
}

#[test]
fn special_amaxes_give_what_each_policy_says() {
    let format = Format::E4M3;
    assert_eq!(dynamic_quant_scale(0.0, format), 4.48e14);
    assert_eq!(dynamic_quant_scale(0.0, Format::E5M2), 5.7344e16);
    assert_eq!(dynamic_quant_scale(f32::INFINITY, format), 0.0);
    assert!(dynamic_quant_scale(f32::NAN, format).is_nan());

    for amax in [0.0, f32::INFINITY, f32::NAN] {
        assert_eq!(current_quant_scale(amax, format, 0.0), 1.0, "{amax}");
        assert_eq!(delayed_quant_scale(amax, format, 0, 3.0), 3.0, "{amax}");
    }
    assert_eq!(current_quant_scale(0.0, format, 0.5), 896.0);
    assert_eq!(current_quant_scale(2.0, format, 0.5), 224.0);
    assert_eq!(current_quant_scale(1e-44, format, 0.0), f32::MAX);
    assert_eq!(delayed_quant_scale(1e-44, format, 0, 1.0), f32::MAX);
    assert_eq!(delayed_quant_scale(2.0, format, 3, 1.0), 28.0);
    assert_eq!(delayed_quant_scale(2.0, format, -1, 1.0), 448.0);
    for margin in [i32::MIN, i32::MAX] {
        assert!(!delayed_quant_scale(2.0, format, margin, 1.0).is_nan());
    }

    assert_eq!(static_dequant_scale(896.0, format), Ok(2.0));
    assert_eq!(static_dequant_scale(0.0, format), Ok(1e-12 / 448.0));
    assert_eq!(
        static_dequant_scale(f32::INFINITY, format),
        Err(ScaleError::NonFinite {
            amax: f32::INFINITY
        })
    );
    assert!(matches!(
        static_dequant_scale(f32::NAN, format),
        Err(ScaleError::NonFinite { .. })
    ));
    assert_eq!(
        static_dequant_scale(-1.0, format),
        Err(ScaleError::Negative { amax: -1.0 })
    );
}

/// Values near the limits of f32 under every margin: neither the scale nor its reciprocal is 0 or infinite, and the slot
/// follows the next amax as usual.
#[test]
fn delayed_scales_stay_finite_both_ways() {
    let amaxes = [1e-45, 1e-38, 1.0, 1e38, f32::MAX];
    for format in Format::ALL {
        for margin in (-140..=140).chain([i32::MIN, -2000, 2000, i32::MAX]) {
            for scale_rounding in [ScaleRounding::Exact, ScaleRounding::PowerOfTwo] {
                let rule = DelayedRule::default()
                    .with_margin(margin)
                    .with_amax_compute(AmaxCompute::MostRecent)
                    .with_scale_rounding(scale_rounding);
                for amax in amaxes {
                    let (mut history, mut quant_scale) = ([0.0; 2], 1.0);
                    update_slot(&rule, format, amax, &mut history, &mut quant_scale);
                    let dequant_scale = reciprocal(quant_scale);
                    for scale in [quant_scale, dequant_scale] {
                        assert!(
                            scale.is_finite() && scale > 0.0,
                            "{format} {rule:?} {amax:e}: {quant_scale:e}, {dequant_scale:e}"
                        );
                    }
                    assert!(
                        quant_scale.is_normal(),
                        "{format} {rule:?} {amax:e}: {quant_scale:e}"
                    );
                    let mut fresh = 1.0;
                    update_slot(&rule, format, 3.0, &mut [0.0; 2], &mut fresh);
                    update_slot(&rule, format, 3.0, &mut history, &mut quant_scale);
                    assert_eq!(quant_scale, fresh, "{format} {rule:?} after {amax:e}");
                }
            }
        }
    }
    assert_eq!(
        delayed_quant_scale(1e38, Format::E4M3, 64, 1.0),
        f32::MIN_POSITIVE
    );
    assert_eq!(delayed_quant_scale(1e38, Format::E4M3, 6, 1.0), 7.0 / 1e38);
}

#[test]
fn the_power_of_two_is_the_one_next_below() {
    for exponent in 1..=254u32 {
        for fraction in [0, 1, 0x0040_0000, 0x007F_FFFF] {
            for sign in [0, 1u32 << 31] {
                let x = f32::from_bits(sign | exponent << 23 | fraction);
                let power = floor_to_power_of_two(x);
                assert_eq!(
                    power.abs(),
                    2f64.powi(exponent as i32 - 127) as f32,
                    "{x:e}"
                );
                assert!(
                    power.abs() <= x.abs() && f64::from(x.abs()) < 2.0 * f64::from(power.abs()),
                    "{x:e}"
                );
                assert_eq!(power.is_sign_negative(), x.is_sign_negative());
            }
        }
    }
    assert_eq!(floor_to_power_of_two(f32::INFINITY), f32::INFINITY);
    assert_eq!(floor_to_power_of_two(f32::NEG_INFINITY), f32::NEG_INFINITY);
    assert!(floor_to_power_of_two(f32::NAN).is_nan());
    assert_eq!(floor_to_power_of_two(0.0), 0.0);
    assert_eq!(floor_to_power_of_two(f32::from_bits(0x007F_FFFF)), 0.0);
}

#[test]
fn mx_scales_fit_their_block() {
    for amax in amaxes(100_000) {
        for format in Format::ALL {
            let quotient = f64::from(amax / format.max());
            let rceil = mx_dequant_scale_rceil(amax, format);
            assert!(f64::from(rceil) >= quotient, "{format} {amax:e}");
            assert!(
                rceil == E8M0::MIN || f64::from(rceil) / 2.0 < quotient,
                "{format} {amax:e}"
            );

            let floor = mx_dequant_scale_floor(amax, format);
            let expected = f64::from(amax).log2().floor() as i32 - format.max_exponent();
            assert_eq!(
                floor.exponent(),
                Some(expected.max(-127)),
                "{format} {amax:e}"
            );
        }
    }
    for format in Format::ALL {
        assert_eq!(mx_dequant_scale_rceil(0.0, format), E8M0::MIN);
        assert_eq!(mx_dequant_scale_floor(0.0, format), E8M0::MIN);
        assert_eq!(mx_dequant_scale_rceil(format.max(), format), E8M0::ONE);
        assert_eq!(mx_dequant_scale_floor(format.max(), format), E8M0::ONE);
        assert_eq!(
            mx_dequant_scale_rceil(format.max().next_up(), format).exponent(),
            Some(1)
        );
        for amax in [f32::INFINITY, f32::NAN] {
            assert!(
                mx_dequant_scale_rceil(amax, format).is_nan()
                    && mx_dequant_scale_floor(amax, format).is_nan()
            );
        }
    }
}

fn rule(amax_compute: AmaxCompute) -> DelayedRule {
    DelayedRule::default().with_amax_compute(amax_compute)
}

proptest! {
    #[test]
    fn a_history_is_the_window_of_the_newest(len in 1..6usize, amaxes in prop::collection::vec(0.01f32..100.0, 1..20)) {
        for (compute, reduce) in [
            (AmaxCompute::Max, (|window: &[f32]| window.iter().copied().fold(0.0, f32::max)) as fn(&[f32]) -> f32),
            (AmaxCompute::MostRecent, |window| window[0]),
        ] {
            let (mut history, mut quant_scale) = (vec![0.0; len], 1.0);
            let mut seen: Vec<f32> = Vec::new();
            for &amax in &amaxes {
                seen.insert(0, amax);
                let update = update_slot(&rule(compute.clone()), Format::E4M3, amax, &mut history, &mut quant_scale);
                prop_assert_eq!(update, SlotUpdate::Updated);
                prop_assert_eq!(&history, &resize_history(&seen, len));
                prop_assert_eq!(quant_scale, 448.0 / reduce(&history));
            }
        }
    }

    #[test]
    fn resizing_keeps_the_newest(history in prop::collection::vec(0.0f32..9.0, 0..8), len in 0..12usize) {
        let resized = resize_history(&history, len);
        prop_assert_eq!(resized.len(), len);
        for (index, amax) in resized.into_iter().enumerate() {
            prop_assert_eq!(amax, history.get(index).copied().unwrap_or(0.0));
        }
    }

    #[test]
    fn an_unusable_amax_changes_nothing(start in prop::collection::vec(0.0f32..9.0, 0..4), scale in 0.1f32..9.0) {
        for (amax, expected) in [
            (0.0, SlotUpdate::Unused),
            (-0.0, SlotUpdate::Unused),
            (f32::INFINITY, SlotUpdate::NonFinite),
            (f32::NAN, SlotUpdate::NonFinite),
        ] {
            let (mut history, mut quant_scale) = (start.clone(), scale);
            let rule = DelayedRule::default().with_scale_rounding(ScaleRounding::PowerOfTwo);
            prop_assert_eq!(update_slot(&rule, Format::E4M3, amax, &mut history, &mut quant_scale), expected);
            prop_assert_eq!((&history, quant_scale), (&start, scale));
        }
    }
}

#[test]
fn a_rule_shapes_the_scale() {
    let mut history = vec![0.0; 3];
    let mut quant_scale = 1.0;
    let powers = DelayedRule::default()
        .with_margin(1)
        .with_scale_rounding(ScaleRounding::PowerOfTwo);
    update_slot(&powers, Format::E4M3, 1.0, &mut history, &mut quant_scale);
    assert_eq!(quant_scale, 128.0);

    let mean = CustomAmax::new("mean", |history| {
        history.iter().sum::<f32>() / history.len() as f32
    });
    let custom = rule(AmaxCompute::Custom(mean.clone()));
    update_slot(&custom, Format::E4M3, 5.0, &mut history, &mut quant_scale);
    assert_eq!(
        (history.as_slice(), quant_scale),
        ([5.0, 1.0, 0.0].as_slice(), 224.0)
    );
    assert_eq!(mean.name(), "mean");
    assert_eq!(AmaxCompute::Custom(mean.clone()), AmaxCompute::Custom(mean));

    // If the function gives no usable amax, the scale stays and the history still rolls.
    let silent = rule(AmaxCompute::Custom(CustomAmax::new("nan", |_| f32::NAN)));
    assert_eq!(
        update_slot(&silent, Format::E4M3, 7.0, &mut history, &mut quant_scale),
        SlotUpdate::Updated
    );
    assert_eq!((history[0], quant_scale), (7.0, 224.0));

    // Without a window only the newest amax is known.
    assert_eq!(
        update_slot(
            &rule(AmaxCompute::Max),
            Format::E4M3,
            2.0,
            &mut [],
            &mut quant_scale
        ),
        SlotUpdate::Updated
    );
    assert_eq!(quant_scale, 224.0);
}
