//! Loops over the functions of activations.

use super::*;

impl Curve {
    pub(crate) fn values<R: Real>(self, x: &[R], y: &mut [R]) {
        with_curve!(self, R, (value, slope) => {
            for (y, &x) in y.iter_mut().zip(x) {
                *y = value(x, R::ONE);
            }
        });
    }

    pub(crate) fn gated<R: Real>(self, gate: &[R], up: &[R], y: &mut [R]) {
        with_curve!(self, R, (value, slope) => {
            for ((y, &gate), &up) in y.iter_mut().zip(gate).zip(up) {
                *y = value(gate, R::ONE) * up;
            }
        });
    }

    pub(crate) fn gradient<R: Real>(self, x: &[R], grad: &[R], dx: &mut [R]) {
        with_curve!(self, R, (value, slope) => {
            for ((dx, &x), &grad) in dx.iter_mut().zip(x).zip(grad) {
                *dx = grad * slope(x);
            }
        });
    }

    pub(crate) fn gated_gradient<R: Real>(
        self,
        gate: &[R],
        up: &[R],
        grad: &[R],
        dgate: &mut [R],
        dup: &mut [R],
    ) {
        with_curve!(self, R, (value, slope) => {
            let inputs = gate.iter().zip(up).zip(grad);
            for ((dgate, dup), ((&gate, &up), &grad)) in dgate.iter_mut().zip(dup).zip(inputs) {
                *dgate = grad * up * slope(gate);
                *dup = grad * value(gate, R::ONE);
            }
        });
    }

    /// `f(scale * d) / scale` of each `d` of `data`, computed without the quotient.
    pub(crate) fn scaled_values<R: Real>(self, scale: R, data: &[R], y: &mut [R]) {
        with_curve!(self, R, (value, slope) => {
            for (y, &d) in y.iter_mut().zip(data) {
                *y = value(d, scale);
            }
        });
    }

    /// `grad` times the slope at `scale * d`.
    pub(crate) fn scaled_gradient<R: Real>(self, scale: R, data: &[R], grad: &[R], dx: &mut [R]) {
        with_curve!(self, R, (value, slope) => {
            for ((dx, &d), &grad) in dx.iter_mut().zip(data).zip(grad) {
                *dx = grad * slope(d * scale);
            }
        });
    }
}
