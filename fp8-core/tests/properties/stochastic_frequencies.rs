//! How often stochastic rounding to 8 bits goes away from zero, in the kernel of every length and in the definition.

use fp8_core::{Cast, Format, Rounding, StochasticKey, encode};

const SAMPLES: usize = 1 << 18;

/// A normal code, a subnormal one, the first normal one and the one before the largest: each with a next code.
fn lows(format: Format) -> [u8; 4] {
    let normal = 1 << format.mantissa_bits();
    [0x38, 1, normal, format.max_code() - 1]
}

fn key(step: u32) -> StochasticKey {
    StochasticKey {
        seed: 29,
        step,
        tensor: 5,
    }
}

fn codes(cast: &Cast, x: f32) -> Vec<u8> {
    let mut codes = vec![0; SAMPLES];
    encode(cast, &vec![x; SAMPLES], 1.0, &mut codes);
    codes
}

#[test]
fn a_value_is_rounded_away_as_often_as_its_fraction_says() {
    for format in Format::ALL {
        for (i, low) in lows(format).into_iter().enumerate() {
            let (a, b) = (format.decode(low), format.decode(low + 1));
            for (j, fraction) in [0.125, 0.25, 0.5, 0.75, 0.875].into_iter().enumerate() {
                let x = a + fraction * (b - a);
                for x in [x, -x] {
                    let step = 16 * i as u32 + 2 * j as u32 + u32::from(x < 0.);
                    let cast = Cast::new(format).with_rounding(Rounding::Stochastic(key(step)));
                    let codes = codes(&cast, x);
                    let sign = if x < 0. { 0x80 } else { 0 };
                    let away = codes.iter().filter(|&&code| code == low + 1 + sign).count();
                    let toward = codes.iter().filter(|&&code| code == low + sign).count();
                    assert_eq!(away + toward, SAMPLES, "{format} {x:e}");
                    let p = f64::from(fraction);
                    let standard_error = (p * (1. - p) / SAMPLES as f64).sqrt();
                    let share = away as f64 / SAMPLES as f64;
                    assert!(
                        (share - p).abs() <= 4. * standard_error,
                        "{format} {x:e}: {share} of {p}, standard error {standard_error}"
                    );
                    for element in [0, 1, 77, SAMPLES - 1] {
                        assert_eq!(
                            codes[element],
                            cast.encode(x, element as u64),
                            "{format} {x:e}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn representable_values_stay() {
    for format in Format::ALL {
        let cast = Cast::new(format).with_rounding(Rounding::Stochastic(key(1)));
        for code in (0..=255).filter(|&code| format.is_finite(code)) {
            let x = vec![format.decode(code); 100];
            let mut codes = vec![0; 100];
            encode(&cast, &x, 1.0, &mut codes);
            assert_eq!(codes, [code; 100], "{format}");
        }
    }
}

#[test]
fn another_step_draws_other_bits() {
    let cast = |step| Cast::new(Format::E5M2).with_rounding(Rounding::Stochastic(key(step)));
    let (first, second) = (codes(&cast(1), 1.125), codes(&cast(2), 1.125));
    // Half of each is rounded away; if they are independent, half of the elements differ.
    let differ = first.iter().zip(&second).filter(|(a, b)| a != b).count();
    let standard_error = (SAMPLES as f64 / 4.).sqrt();
    assert!(
        (differ as f64 - SAMPLES as f64 / 2.).abs() <= 4. * standard_error,
        "{differ}"
    );
    assert_eq!(first, codes(&cast(1), 1.125));
}
