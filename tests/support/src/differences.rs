//! Derivatives by finite differences, with bounds on how far they are off.

/// A derivative by differences over four and over eight steps, extrapolated (Richardson).
#[derive(Debug, Clone, Copy)]
pub struct Slope {
    /// The derivative.
    pub value: f64,
    /// How far it may be off because steps are finite. What is left after the extrapolation grows with the fourth power of the step,
    /// so a derivative from twice the step is off by 16 times as much, and the two differ by 15 times the error. It is
    /// taken to be 8 times at least, since higher powers of the step contribute too.
    pub truncation: f64,
    step: f64,
}

impl Slope {
    /// The derivative at 0 of `f`.
    pub fn of(step: f64, mut f: impl FnMut(f64) -> f64) -> Self {
        let mut plain = |step: f64| (f(step) - f(-step)) / (2. * step);
        let [one, two, four] = [step, 2. * step, 4. * step].map(&mut plain);
        let [value, far] = [(4. * one - two) / 3., (4. * two - four) / 3.];
        Self {
            value,
            truncation: (far - value).abs() / 8.,
            step,
        }
    }

    /// How far the derivative may be off if each value of `f` may be off by `rounding`.
    pub fn bound(self, rounding: f64) -> f64 {
        // The weights of the four values add up to 18 / 12 steps.
        self.truncation + 1.5 * rounding / self.step
    }
}
