//! Functions of the value whose results do not grow with the scale: it is 1.

use super::arith::Like;
use super::error::Result;
use super::kernels::{Map, map, map_fn};
use super::value::Scaled;
use candle_core::{DType, Tensor};
use fp8_candle::ops::elements::Real;
use fp8_core::scaled::{Factored, Scale, ScaledError};
use half::{bf16, f16};

/// Slope of erf at 0.
const TWO_OVER_SQRT_PI: f64 = std::f64::consts::FRAC_2_SQRT_PI;

#[inline(always)]
fn logistic<R: Real>(x: R) -> R {
    R::ONE / (R::ONE + (-x).exp())
}

/// The logistic function of tensors, without a dependency on `candle_nn`.
fn logistic_of(x: &Tensor) -> candle_core::Result<Tensor> {
    ((x.neg()?.exp()? + 1.0)?).recip()
}

// Of the value `s * x`; the slopes take the cotangent first.
map_fn!(Exp { s }, |x| (s * x).exp(), |x| (x * s)?.exp()?);
map_fn!(Sin { s }, |x| (s * x).by((f32::sin, f64::sin)), |x| (x
    * s)?
    .sin()?);
map_fn!(Cos { s }, |x| (s * x).by((f32::cos, f64::cos)), |x| (x
    * s)?
    .cos()?);
map_fn!(Tanh { s }, |x| (s * x).by((f32::tanh, f64::tanh)), |x| (x
    * s)?
    .tanh()?);
map_fn!(Erf { s }, |x| (s * x).by((libm::erff, libm::erf)), |x| (x
    * s)?
    .erf()?);
map_fn!(Sigmoid { s }, |x| logistic(s * x), |x| logistic_of(
    &(x * s)?
)?);
map_fn!(ExpSlope { s }, |g, x| g * (s * x).exp(), |g, x| (g
    * (x * s)?.exp()?)?);
map_fn!(
    SinSlope { s },
    |g, x| g * (s * x).by((f32::cos, f64::cos)),
    |g, x| (g * (x * s)?.cos()?)?
);
map_fn!(
    CosSlope { s },
    |g, x| -(g * (s * x).by((f32::sin, f64::sin))),
    |g, x| (g * (x * s)?.sin()?)?.neg()?
);
map_fn!(
    TanhSlope { s },
    // 1 - tanh^2 without cancellation.
    |g, x| {
        let twice = s * x + s * x;
        let four = R::from_f64(4.0);
        g * (four * logistic(twice) * logistic(-twice))
    },
    |g, x| (g * (1.0 - (x * s)?.tanh()?.sqr()?)?)?
);
map_fn!(
    ErfSlope { s },
    |g, x| {
        let v = s * x;
        g * (R::from_f64(TWO_OVER_SQRT_PI) * (-(v * v)).exp())
    },
    |g, x| (g * ((x * s)?.sqr()?.neg()?.exp()? * TWO_OVER_SQRT_PI)?)?
);
map_fn!(
    SigmoidSlope { s },
    |g, x| g * (logistic(s * x) * logistic(-(s * x))),
    |g, x| (g * (logistic_of(&(x * s)?)? * logistic_of(&(x * -s)?)?)?)?
);

map_fn!(Ln {}, |x| x.ln(), |x| x.log()?);
map_fn!(Shift { by }, |x| x + by, |x| (x + by)?);

macro_rules! functions {
    ($($(#[$doc:meta])+ $op:ident: $F:ident, $Slope:ident;)+) => {$(
        $(#[$doc])+
        pub fn $op(&self) -> Result<Self> {
            let s = self.s();
            self.of_value(stringify!($op), $F { s }, $Slope { s })
        }
    )+};
}

impl Scaled {
    /// Applies `f` to the value; the result has the scale 1. `slope` gives the cotangent from the result's cotangent and the value.
    fn of_value(
        &self,
        op: &'static str,
        f: impl Map<1>,
        slope: impl Map<2> + 'static,
    ) -> Result<Self> {
        let x = self.detach().zeroed()?;
        let value = Self::new(map(op, f, [&x.data()?])?, Scale::ONE);
        Ok(self.recorded(value, op, move |g| {
            g.sloped(op, slope, &x, g.scale_factored())
        }))
    }

    /// A cotangent `f(self, other)` with the scale of `rule` and the shape and dtype of `other`; `f` includes the rule's data factor.
    pub(super) fn sloped(
        &self,
        op: &'static str,
        f: impl Map<2>,
        other: &Self,
        rule: Factored,
    ) -> Result<Self> {
        let (g, x) = super::arith::meet(op, self, other)?;
        let value = Self::new(map(op, f, [&g, &x])?, rule.scale).zeroed()?;
        Like::of(other).cotangent(&value)
    }

    /// The rule of an operation that keeps the scale.
    pub(super) fn scale_factored(&self) -> Factored {
        Factored {
            scale: self.scale(),
            data_factor: 1.0,
        }
    }

    fn s(&self) -> f64 {
        f64::from(self.scale().to_f32())
    }

    functions! {
        /// `e^self`, of the scale 1.
        exp: Exp, ExpSlope;
        /// The sine of the value, of the scale 1.
        sin: Sin, SinSlope;
        /// The cosine of the value, of the scale 1.
        cos: Cos, CosSlope;
        /// The hyperbolic tangent of the value, of the scale 1.
        tanh: Tanh, TanhSlope;
        /// The error function of the value, of the scale 1.
        erf: Erf, ErfSlope;
        /// `1 / (1 + e^-self)`, of the scale 1.
        sigmoid: Sigmoid, SigmoidSlope;
    }

    /// The natural logarithm, of the scale 1: `log(data) + log(scale)`, each term rounded to the dtype of the data.
    ///
    /// # Errors
    /// [`ScaledError::Zero`] if the scale is 0.
    pub fn log(&self) -> Result<Self> {
        let op = "log";
        if self.scale().is_zero() {
            return Err(ScaledError::Zero { op }.into());
        }
        let data = map(op, Ln {}, [&self.data()?])?;
        let by = match data.dtype() {
            DType::F16 => f16::from_f64(self.s().ln()).to_f64(),
            DType::BF16 => bf16::from_f64(self.s().ln()).to_f64(),
            _ => self.s().ln(),
        };
        let value = Self::new(map(op, Shift { by }, [&data])?, Scale::ONE);
        let x = self.detach();
        Ok(self.recorded(value, op, move |g| Like::of(&x).cotangent(&g.div(&x)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::kernel_tests::check;
    use super::*;

    #[test]
    fn kernels_and_their_definitions() {
        let s = 0.75;
        check(Exp { s }, false);
        check(Sin { s }, false);
        check(Cos { s }, false);
        check(Tanh { s }, false);
        check(Erf { s }, false);
        check(Sigmoid { s }, false);
        check(ExpSlope { s }, false);
        check(SinSlope { s }, false);
        check(CosSlope { s }, false);
        check(TanhSlope { s }, false);
        check(ErfSlope { s }, false);
        check(SigmoidSlope { s }, false);
        check(Ln {}, true);
        check(Shift { by: s }, false);
    }

    #[test]
    fn a_slope_does_not_cancel() {
        // 1 - tanh^2 would be 0 from 9.1 on.
        let slope = TanhSlope { s: 1.0 }.apply([1f32, 12.0]);
        let expected = 1.0 / 12f64.cosh().powi(2);
        assert!(
            (f64::from(slope) / expected - 1.0).abs() < 1e-6,
            "{slope:e}"
        );
    }
}
