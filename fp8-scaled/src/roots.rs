//! Roots and powers, whose scale is a power of the operand's scale.

use super::arith::Like;
use super::error::Result;
use super::kernels::{Map, map, map_fn};
use super::value::Scaled;
use candle_core::Tensor;
use fp8_candle::ops::elements::Real;
use fp8_core::scaled::{Scale, ScaledError, div_rule, mul_rule, powi_rule, rsqrt_rule, sqrt_rule};

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

impl Map<1> for Power {
    #[inline(always)]
    fn apply<R: Real>(self, [x]: [R; 1]) -> R {
        // By squaring: x^13 = x * x^4 * x^8.
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
        // The factor is Inf if the power of the scale is out of range.
        let product = R::from_f64(self.factor) * power;
        if power == R::ZERO { power } else { product }
    }

    fn composed(self, [x]: [&Tensor; 1]) -> Result<Tensor> {
        let mut power = x.ones_like()?;
        for _ in 0..self.exponent.unsigned_abs() {
            power = (power * x)?;
        }
        let power = match self.exponent < 0 {
            true => power.recip()?,
            false => power,
        };
        let product = (&power * self.factor)?;
        Ok(power.eq(0.0)?.where_cond(&power, &product)?)
    }
}

impl Scaled {
    /// The square root. Scale: `r(sqrt(s))`. The backward pass of a tensor of zero scale fails.
    pub fn sqrt(&self) -> Result<Self> {
        let op = "sqrt";
        let rule = sqrt_rule(self.scale());
        let k = rule.data_factor.into();
        let value = Self::new(map(op, Sqrt { k }, [&self.data()?])?, rule.scale).zeroed()?;
        let (x, y) = (Like::of(self), value.clone());
        Ok(self.recorded(value, op, move |g| {
            x.cotangent(&g.div(&y)?.mul_constant(0.5)?)
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
        let value = Self::new(map(op, Rsqrt { k }, [&self.data()?])?, rule.scale);
        let (x, y) = (self.detach(), value.clone());
        Ok(self.recorded(value, op, move |g| {
            let g = g.mul(&y)?.div(&x)?.mul_constant(-0.5)?;
            Like::of(&x).cotangent(&g)
        }))
    }

    /// `self * self`. Scale: `s^2`.
    pub fn square(&self) -> Result<Self> {
        let op = "square";
        let rule = mul_rule(self.scale(), self.scale());
        let k = rule.data_factor.into();
        let value = Self::new(map(op, Square { k }, [&self.data()?])?, rule.scale).zeroed()?;
        let x = self.detach();
        Ok(self.recorded(value, op, move |g| {
            Like::of(&x).cotangent(&g.mul(&x)?.mul_constant(2.0)?)
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
        let value = Self::new(map(op, Recip { k }, [&self.data()?])?, rule.scale);
        let (x, y) = (Like::of(self), value.clone());
        Ok(self.recorded(value, op, move |g| {
            // Step by step, since the product of three scales may overflow on the way.
            let square = mul_rule(y.scale(), y.scale());
            let rule = mul_rule(g.scale(), square.scale);
            let k = f64::from(square.data_factor) * f64::from(rule.data_factor);
            x.cotangent(&g.sloped(op, RecipSlope { k }, &y, rule)?)
        }))
    }

    /// A power with a whole exponent. Scale: `s^exponent`. 0^0 is 1.
    ///
    /// # Errors
    /// [`ScaledError::Zero`] if the scale is 0 and the exponent negative.
    pub fn powi(&self, exponent: i32) -> Result<Self> {
        let op = "powi";
        let rule = powi_rule(self.scale(), exponent)?;
        let factor = rule.data_factor.into();
        let x = self.detach().zeroed()?;
        let data = map(op, Power { exponent, factor }, [&x.data()?])?;
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
    use super::super::kernel_tests::check;
    use super::*;

    #[test]
    fn kernels_and_their_definitions() {
        let k = 2.0;
        check(Sqrt { k }, true);
        check(Rsqrt { k }, true);
        check(Square { k }, false);
        check(Recip { k }, true);
        check(RecipSlope { k }, false);
        for exponent in [-4, -1, 0, 1, 2, 3, 7] {
            check(
                Power {
                    exponent,
                    factor: 2.0,
                },
                true,
            );
        }
    }
}
