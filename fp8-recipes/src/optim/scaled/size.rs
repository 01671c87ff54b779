//! Which scale new data get.

use fp8_scaled::Scale;

/// Between which powers of two the largest magnitude of data lies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    /// Exponents of the lowest and the highest power of two below it that change nothing.
    low: i32,
    high: i32,
    /// Exponent that a new scale gives it.
    goal: i32,
}

impl Window {
    /// Data go into FP8 as they are: below 256, and mostly above the subnormals of E4M3.
    pub(super) const PARAMETER: Self = Self {
        low: 0,
        high: 7,
        goal: 3,
    };
    /// Nobody multiplies moments: near the top of f16, so that elements far below the largest are kept.
    pub(super) const MOMENT: Self = Self {
        low: 4,
        high: 13,
        goal: 11,
    };

    /// The scale for values of the magnitude `bound` at most, where the old data had `scale`.
    pub(super) fn scale(self, scale: Option<Scale>, bound: f64) -> Scale {
        let old = scale.unwrap_or(Scale::ZERO);
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

/// The exponent of the power of two below `x`, which is positive; far beyond f32 for an infinity.
fn exponent(x: f64) -> i32 {
    ((x.to_bits() >> 52) & 0x7FF) as i32 - 1023
}

/// What data are multiplied by in a step, in f32. Data of a tensor of zeros may meet a factor beyond it, which must not make NaN;
/// nothing over the scale of nothing is 0.
pub(super) fn factor(x: f64) -> f32 {
    if x.is_nan() {
        return 0.0;
    }
    (x as f32).min(f32::MAX)
}

pub(super) fn value(scale: Scale) -> f64 {
    f64::from(scale.to_f32())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_moves_only_out_of_the_window() {
        let window = Window::PARAMETER;
        let s = Scale::power_of_two(-5);
        let at = |data: f64| window.scale(Some(s), data * value(s)).exponent();
        for inside in [1.0, 1.5, 8.0, 255.9] {
            assert_eq!(at(inside), Some(-5), "{inside}");
        }
        // To data from 8 up to 16.
        for (outside, exponent) in [(0.999, -9), (256.0, 0), (1e6, 11)] {
            assert_eq!(at(outside), Some(exponent), "{outside}");
        }
        assert_eq!(at(0.0), Some(-5));
        assert_eq!(window.scale(Some(Scale::ZERO), 1.0).exponent(), Some(-3));
        assert!(window.scale(None, 0.0).is_zero());
        assert_eq!(window.scale(Some(s), f64::MAX), Scale::MAX);
        assert_eq!(window.scale(Some(s), f64::MIN_POSITIVE), Scale::MIN);
    }
}
