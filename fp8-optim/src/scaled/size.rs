//! The choice of the scale of new data.

use fp8_scaled::Scale;

/// The range in which the largest magnitude of data may lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    /// Exponents of the lowest and the highest largest magnitude with which data keep their scale.
    low: i32,
    high: i32,
    /// Exponent of the largest magnitude after a change of scale.
    goal: i32,
}

impl Window {
    /// For parameters, whose data are cast to FP8 without another scale: below 256, and mostly above the subnormals of E4M3.
    pub(crate) const PARAMETER: Self = Self {
        low: 0,
        high: 7,
        goal: 3,
    };
    /// For moments, which no product reads: near the top of f16, so that elements far below the largest do not underflow.
    pub(crate) const MOMENT: Self = Self {
        low: 4,
        high: 13,
        goal: 11,
    };

    /// The scale for values of at most the magnitude `bound`, where the old data had the scale `old`.
    pub(crate) fn scale(self, old: Scale, bound: f64) -> Scale {
        if bound == 0.0 || !bound.is_finite() {
            return old;
        }
        let here = exponent(bound / f64::from(old.to_f32()));
        if !old.is_zero() && (self.low..=self.high).contains(&here) {
            return old;
        }
        Scale::power_of_two(exponent(bound) - self.goal)
    }
}

/// The exponent of the largest power of two that is at most `x`, which is positive; above all exponents of f32 if `x` is infinite.
fn exponent(x: f64) -> i32 {
    ((x.to_bits() >> 52) & 0x7FF) as i32 - 1023
}

/// A factor of data in f32: finite, since zero data times infinity would be NaN, and 0 for NaN, the quotient of two zero scales.
pub(crate) fn factor(x: f64) -> f32 {
    if x.is_nan() {
        return 0.0;
    }
    (x as f32).min(f32::MAX)
}

pub(crate) fn value(scale: Scale) -> f64 {
    f64::from(scale.to_f32())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_moves_only_out_of_the_window() {
        let window = Window::PARAMETER;
        let s = Scale::power_of_two(-5);
        let at = |data: f64| window.scale(s, data * value(s)).exponent();
        for inside in [1.0, 1.5, 8.0, 255.9] {
            assert_eq!(at(inside), Some(-5), "{inside}");
        }
        // To data from 8 up to 16.
        for (outside, exponent) in [(0.999, -9), (256.0, 0), (1e6, 11)] {
            assert_eq!(at(outside), Some(exponent), "{outside}");
        }
        assert_eq!(at(0.0), Some(-5));
        assert_eq!(window.scale(Scale::ZERO, 1.0).exponent(), Some(-3));
        assert!(window.scale(Scale::ZERO, 0.0).is_zero());
        assert_eq!(window.scale(s, f64::MAX), Scale::MAX);
        assert_eq!(window.scale(s, f64::MIN_POSITIVE), Scale::MIN);
    }
}
