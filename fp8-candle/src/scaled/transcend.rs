//! Functions of the value that have no scale to keep, and roots and powers, that do.

use super::arith::Like;
use super::kernels::{Map1, Map2, map_fn, map1, map2};
use super::value::Scaled;
use crate::error::Result;
use crate::ops::math::Real;
use candle_core::{DType, Tensor};
use fp8_core::scaled::{
    Factored, Scale, ScaledError, div_rule, mul_rule, powi_rule, rsqrt_rule, sqrt_rule,
};
use half::{bf16, f16};

/// Slope of erf at 0.
const TWO_OVER_SQRT_PI: f64 = std::f64::consts::FRAC_2_SQRT_PI;

#[inline(always)]
fn logistic<R: Real>(x: R) -> R {
    R::ONE / (R::ONE + (-x).exp())
}

/// The logistic function of candle tensors; `candle_nn` is no dependency.
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
    // 1 - tanh^2 without its cancellation.
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
map_fn!(Sqrt { k }, |x| (k * x).sqrt(), |x| (x * k)?.sqrt()?);
map_fn!(Rsqrt { k }, |x| R::ONE / (k * x).sqrt(), |x| (x * k)?
    .sqrt()?
    .recip()?);
map_fn!(Square { k }, |x| k * (x * x), |x| (x.sqr()? * k)?);
map_fn!(Recip { k }, |x| k / x, |x| (x.recip()? * k)?);
map_fn!(
    RecipSlope { k },
    |g, y| -(k * (g * y * y)),
    |g, y| (((g * y)? * y)? * -k)?
);

/// `factor * x^exponent`.
#[derive(Clone, Copy)]
struct Power {
    exponent: i32,
    factor: f64,
}

impl Map1 for Power {
    #[inline(always)]
    fn apply<R: Real>(self, x: R) -> R {
        // By squares: x^13 = x * x^4 * x^8.
        let (mut left, mut square, mut power) = (self.exponent.unsigned_abs(), x, R::ONE);
        while left > 0 {
            if left & 1 == 1 {
                power = power * square;
            }
            left >>= 1;
            if left > 0 {
                square = square * square;
            }
        }
        let power = if self.exponent < 0 {
            R::ONE / power
        } else {
            power
        };
        R::from_f64(self.factor) * power
    }

    fn composed(self, x: &Tensor) -> Result<Tensor> {
        let mut power = x.ones_like()?;
        for _ in 0..self.exponent.unsigned_abs() {
            power = (power * x)?;
        }
        let power = match self.exponent < 0 {
            true => power.recip()?,
            false => power,
        };
        Ok((power * self.factor)?)
    }
}

impl Scaled {
    /// `f` of the value with the scale 1. `slope` gives the cotangent from that of the result and the value.
    fn of_value(&self, op: &'static str, f: impl Map1, slope: impl Map2 + 'static) -> Result<Self> {
        let x = self.detach().zeroed()?;
        let value = Self::new(map1(op, f, &x.data()?)?, Scale::ONE);
        Ok(Self::record(value, op, [self], move |g, _| {
            Ok([Some(g.sloped(op, slope, &x, g.scale_factored())?)])
        }))
    }

    /// A cotangent `f(self, other)` at the scale of `rule`, where `f` has taken up its data factor; it is like `other`.
    pub(super) fn sloped(
        &self,
        op: &'static str,
        f: impl Map2,
        other: &Self,
        rule: Factored,
    ) -> Result<Self> {
        let (g, x) = super::arith::meet(op, self, other)?;
        let value = Self::new(map2(op, f, &g, &x)?, rule.scale).zeroed()?;
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

    /// `e^self`, of the scale 1.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use fp8_candle::scaled::Scaled;
    /// let x = Scaled::from_parts(&Tensor::new(&[0f32, 0.25], &Device::Cpu)?, 4.0)?;
    /// assert_eq!(x.exp()?.scale().to_f32(), 1.0);
    /// assert_eq!(x.exp()?.to_vec1()?, [1.0, std::f32::consts::E]);
    /// # Ok::<(), fp8_candle::Error>(())
    /// ```
    pub fn exp(&self) -> Result<Self> {
        let s = self.s();
        self.of_value("exp", Exp { s }, ExpSlope { s })
    }

    /// The sine of the value, of the scale 1.
    pub fn sin(&self) -> Result<Self> {
        let s = self.s();
        self.of_value("sin", Sin { s }, SinSlope { s })
    }

    /// The cosine of the value, of the scale 1.
    pub fn cos(&self) -> Result<Self> {
        let s = self.s();
        self.of_value("cos", Cos { s }, CosSlope { s })
    }

    /// The hyperbolic tangent of the value, of the scale 1.
    pub fn tanh(&self) -> Result<Self> {
        let s = self.s();
        self.of_value("tanh", Tanh { s }, TanhSlope { s })
    }

    /// The error function of the value, of the scale 1.
    pub fn erf(&self) -> Result<Self> {
        let s = self.s();
        self.of_value("erf", Erf { s }, ErfSlope { s })
    }

    /// `1 / (1 + e^-self)`, of the scale 1.
    pub fn sigmoid(&self) -> Result<Self> {
        let s = self.s();
        self.of_value("sigmoid", Sigmoid { s }, SigmoidSlope { s })
    }

    /// The natural logarithm, of the scale 1: `log(data) + log(scale)`, each term rounded to the dtype of the data.
    ///
    /// # Errors
    /// [`ScaledError::Zero`] if the scale is 0.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use fp8_candle::scaled::Scaled;
    /// let x = Scaled::from_parts(&Tensor::new(&[1f32, 2.0], &Device::Cpu)?, 2.0)?;
    /// assert_eq!(x.log()?.to_vec1()?, [2f32.ln(), 2f32.ln() + 2f32.ln()]);
    /// # Ok::<(), fp8_candle::Error>(())
    /// ```
    pub fn log(&self) -> Result<Self> {
        let op = "log";
        if self.scale().is_zero() {
            return Err(ScaledError::Zero { op }.into());
        }
        let data = map1(op, Ln {}, &self.data()?)?;
        let by = match data.dtype() {
            DType::F16 => f16::from_f64(self.s().ln()).to_f64(),
            DType::BF16 => bf16::from_f64(self.s().ln()).to_f64(),
            _ => self.s().ln(),
        };
        let value = Self::new(map1(op, Shift { by }, &data)?, Scale::ONE);
        let x = self.detach();
        Ok(Self::record(value, op, [self], move |g, _| {
            Ok([Some(Like::of(&x).cotangent(&g.div(&x)?)?)])
        }))
    }

    /// The square root. Scale: `r(sqrt(s))`. The derivative of a tensor of zero scale is an error.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use fp8_candle::scaled::Scaled;
    /// let x = Scaled::from_parts(&Tensor::new(&[2f32, 8.0], &Device::Cpu)?, 8.0)?;
    /// let root = x.sqrt()?;
    /// assert_eq!((root.scale().to_f32(), root.to_vec1()?), (2.0, vec![4.0, 8.0]));
    /// # Ok::<(), fp8_candle::Error>(())
    /// ```
    pub fn sqrt(&self) -> Result<Self> {
        let op = "sqrt";
        let rule = sqrt_rule(self.scale());
        let k = rule.data_factor.into();
        let value = Self::new(map1(op, Sqrt { k }, &self.data()?)?, rule.scale).zeroed()?;
        let (x, y) = (Like::of(self), value.clone());
        Ok(Self::record(value, op, [self], move |g, _| {
            Ok([Some(x.cotangent(&g.div(&y)?.mul_constant(0.5)?)?)])
        }))
    }

    /// `1 / sqrt(self)`. Scale: `r(1 / sqrt(s))`.
    ///
    /// # Errors
    /// [`ScaledError::Zero`] if the scale is 0.
    pub fn rsqrt(&self) -> Result<Self> {
        let op = "rsqrt";
        let rule = rsqrt_rule(self.scale())?;
        let k = rule.data_factor.into();
        let value = Self::new(map1(op, Rsqrt { k }, &self.data()?)?, rule.scale);
        let (x, y) = (self.detach(), value.clone());
        Ok(Self::record(value, op, [self], move |g, _| {
            let g = g.mul(&y)?.div(&x)?.mul_constant(-0.5)?;
            Ok([Some(Like::of(&x).cotangent(&g)?)])
        }))
    }

    /// `self * self`. Scale: `s^2`.
    pub fn square(&self) -> Result<Self> {
        let op = "square";
        let rule = mul_rule(self.scale(), self.scale());
        let k = rule.data_factor.into();
        let value = Self::new(map1(op, Square { k }, &self.data()?)?, rule.scale).zeroed()?;
        let x = self.detach();
        Ok(Self::record(value, op, [self], move |g, _| {
            Ok([Some(
                Like::of(&x).cotangent(&g.mul(&x)?.mul_constant(2.0)?)?,
            )])
        }))
    }

    /// `1 / self`. Scale: `1 / s`.
    ///
    /// # Errors
    /// [`ScaledError::Zero`] if the scale is 0.
    pub fn recip(&self) -> Result<Self> {
        let op = "recip";
        let rule = div_rule(Scale::ONE, self.scale()).map_err(|_| ScaledError::Zero { op })?;
        let k = rule.data_factor.into();
        let value = Self::new(map1(op, Recip { k }, &self.data()?)?, rule.scale);
        let (x, y) = (Like::of(self), value.clone());
        Ok(Self::record(value, op, [self], move |g, _| {
            // One step after the other, as the product of three scales may leave the range on the way.
            let square = mul_rule(y.scale(), y.scale());
            let rule = mul_rule(g.scale(), square.scale);
            let k = f64::from(square.data_factor) * f64::from(rule.data_factor);
            Ok([Some(x.cotangent(&g.sloped(
                op,
                RecipSlope { k },
                &y,
                rule,
            )?)?)])
        }))
    }

    /// A power with a whole exponent. Scale: `s^exponent`. 0^0 is 1.
    ///
    /// # Errors
    /// [`ScaledError::Zero`] if the scale is 0 and the exponent negative.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use fp8_candle::scaled::Scaled;
    /// let x = Scaled::from_parts(&Tensor::new(&[1.5f32, -1.0], &Device::Cpu)?, 2.0)?;
    /// let cube = x.powi(3)?;
    /// assert_eq!((cube.scale().to_f32(), cube.to_vec1()?), (8.0, vec![27.0, -8.0]));
    /// # Ok::<(), fp8_candle::Error>(())
    /// ```
    pub fn powi(&self, exponent: i32) -> Result<Self> {
        let op = "powi";
        let rule = powi_rule(self.scale(), exponent)?;
        let factor = rule.data_factor.into();
        let x = self.detach().zeroed()?;
        let data = map1(op, Power { exponent, factor }, &x.data()?)?;
        let value = Self::new(data, rule.scale).zeroed()?;
        Ok(Self::record(value, op, [self], move |g, _| {
            if exponent == 0 {
                return Ok([None]);
            }
            let slope = x.powi(exponent.saturating_sub(1))?;
            let g = g.mul(&slope)?.mul_constant(exponent.into())?;
            Ok([Some(Like::of(&x).cotangent(&g)?)])
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::held::{check1, check2};
    use super::*;

    #[test]
    fn kernels_and_their_definitions() {
        let (s, k) = (0.75, 2.0);
        check1(Exp { s }, false);
        check1(Sin { s }, false);
        check1(Cos { s }, false);
        check1(Tanh { s }, false);
        check1(Erf { s }, false);
        check1(Sigmoid { s }, false);
        check2(ExpSlope { s }, false);
        check2(SinSlope { s }, false);
        check2(CosSlope { s }, false);
        check2(TanhSlope { s }, false);
        check2(ErfSlope { s }, false);
        check2(SigmoidSlope { s }, false);
        check1(Ln {}, true);
        check1(Shift { by: s }, false);
        check1(Sqrt { k }, true);
        check1(Rsqrt { k }, true);
        check1(Square { k }, false);
        check1(Recip { k }, true);
        check2(RecipSlope { k }, false);
        for exponent in [-4, -1, 0, 1, 2, 3, 7] {
            check1(
                Power {
                    exponent,
                    factor: 2.0,
                },
                true,
            );
        }
    }

    #[test]
    fn a_slope_does_not_cancel() {
        // 1 - tanh^2 would be 0 from 9.1 on.
        let slope = TanhSlope { s: 1.0 }.apply(1f32, 12.0);
        let expected = 1.0 / 12f64.cosh().powi(2);
        assert!(
            (f64::from(slope) / expected - 1.0).abs() < 1e-6,
            "{slope:e}"
        );
    }
}
