//! E5M2 casts against the FP8 Emulation Toolkit (mpemu), which rounds to f16 first.
//!
//! Its inputs are not in the file, but most of them are known: all finite values of E4M3 in order, the midpoints
//! between them, those midpoints one f32 step up and down, then (after other values) the same for E5M2. The step is
//! lost in f16, which is what `via_f16` is for.
//!
//! The `chunks31` columns, of 31 values per call, are compared. In longer calls mpemu takes a vector path that rounds to
//! nearest-even whatever the mode; with its nearest-even columns all inputs are compared.
//! mpemu's names: RNAZ ties away from zero, RTZ toward zero. RNTZ (ties toward zero) has no counterpart here. RNINF is
//! not a directed mode: it truncates positive values, which is toward negative infinity, but rounds negative ones to the
//! nearest, with ties downward; only positive values are compared.

use crate::common::{f32s, golden};
use fp8_core::{Cast, Format, Overflow, Rounding};
use half::{bf16, f16};
use safetensors::SafeTensors;

/// The finite values in order, with the one zero that a sort keeps, -0.
fn finite_values(format: Format) -> Vec<f32> {
    let mut values: Vec<f32> = (0..=255)
        .filter(|&code| format.is_finite(code) && code != 0)
        .map(|code| format.decode(code))
        .collect();
    values.sort_by(f32::total_cmp);
    values
}

/// Inputs from index `start` of the file on: values, midpoints, midpoints one step off to either side.
fn inputs(format: Format, start: usize) -> Vec<(usize, f32)> {
    let values = finite_values(format);
    let midpoints: Vec<f32> = values
        .windows(2)
        .map(|pair| (pair[0] + pair[1]) / 2.0)
        .collect();
    let up = midpoints.iter().map(|x| x.next_up());
    let down = midpoints.iter().map(|x| x.next_down());
    let all = values
        .iter()
        .copied()
        .chain(midpoints.iter().copied())
        .chain(up)
        .chain(down);
    all.enumerate()
        .map(|(index, x)| (start + index, x))
        .collect()
}

fn known_inputs() -> Vec<(usize, f32)> {
    [inputs(Format::E4M3, 0), inputs(Format::E5M2, 1075)].concat()
}

/// Compares `column`, whose values are multiplied by `quant_scale` before the cast and divided by it after.
fn compare(
    column: &str,
    rounding: Rounding,
    quant_scale: f32,
    file: &SafeTensors<'_>,
    inputs: &[(usize, f32)],
) {
    let cast = Cast::new(Format::E5M2)
        .with_rounding(rounding)
        .with_overflow(Overflow::NonFinite)
        .with_via_f16(true);
    let expected = f32s(file, column);
    let mut compared = 0;
    for &(index, x) in inputs {
        let Some(expected) = expected.get(index) else {
            continue;
        };
        let value = cast.round(x * quant_scale, 0) / quant_scale;
        assert_eq!(
            value.to_bits(),
            expected.to_bits(),
            "{column} {index}: {x:e} gives {value:e}, not {expected:e}"
        );
        compared += 1;
    }
    assert!(compared > 900, "{column}: only {compared} compared");
}

#[test]
fn every_mode_equals_the_scalar_path() {
    let bytes = golden("mpemu_e5m2.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let inputs = known_inputs();
    for (name, rounding) in [
        ("RNE", Rounding::NearestEven),
        ("RNAZ", Rounding::NearestAway),
        ("RTZ", Rounding::TowardZero),
    ] {
        compare(
            &format!("E5M2_{name}.chunks31.s1.0"),
            rounding,
            1.0,
            &file,
            &inputs,
        );
    }
    let positive: Vec<(usize, f32)> = inputs.into_iter().filter(|(_, x)| *x > 0.0).collect();
    compare(
        "E5M2_RNINF.chunks31.s1.0",
        Rounding::TowardNegative,
        1.0,
        &file,
        &positive,
    );
}

#[test]
fn nearest_even_equals_the_vector_path() {
    let bytes = golden("mpemu_e5m2.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for (column, quant_scale) in [("E5M2_RNE.vec.s1.0", 1.0), ("E5M2_RNE.vec.s0.25", 0.25)] {
        compare(
            column,
            Rounding::NearestEven,
            quant_scale,
            &file,
            &known_inputs(),
        );
    }
}

/// The toolkit's rule on all inputs: add half a step and the last bit to the bits of the f16, and cut them; beyond the range is Inf.
#[test]
fn nearest_even_equals_the_toolkits_rule_on_all_f16_and_bf16() {
    let cast = Cast::new(Format::E5M2)
        .with_overflow(Overflow::NonFinite)
        .with_via_f16(true);
    let f16s = (0..=u16::MAX).map(f16::from_bits);
    let bf16s = (0..=u16::MAX).map(|bits| bf16::from_bits(bits).to_f32());
    for x in f16s.map(f16::to_f32).chain(bf16s) {
        let value = cast.round(x, 0);
        if x.is_nan() {
            assert!(value.is_nan());
            continue;
        }
        let half = f16::from_f32(x).to_bits();
        let expected = match half & 0x7C00 {
            0x7C00 => half,
            _ => (half + 0x7F + ((half >> 8) & 1)) & 0xFF00,
        };
        let expected = f16::from_bits(expected).to_f32();
        assert_eq!(value.to_bits(), expected.to_bits(), "{x:e}");
    }
}

#[test]
fn toward_positive_mirrors_toward_negative() {
    let negative = Cast::new(Format::E5M2)
        .with_rounding(Rounding::TowardNegative)
        .with_via_f16(true);
    let positive = negative.with_rounding(Rounding::TowardPositive);
    for (_, x) in known_inputs() {
        assert_eq!(
            positive.encode(-x, 0),
            negative.encode(x, 0) ^ 0x80,
            "{x:e}"
        );
    }
}

#[test]
fn the_second_rounding_shows() {
    let cast = Cast::new(Format::E5M2);
    let x = 1.125 + 2f32.powi(-20);
    assert_eq!(cast.round(x, 0), 1.25);
    assert_eq!(cast.with_via_f16(true).round(x, 0), 1.0);
}
