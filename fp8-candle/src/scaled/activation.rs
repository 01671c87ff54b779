//! Activation functions that are not homogeneous but nearly so.

use super::kernels::{Map1, Map2, map1, map2, sized};
use super::value::Scaled;
use crate::error::Result;
use crate::ops::math::Real;
use candle_core::Tensor;

impl Scaled {
    /// Gaussian error linear unit, the tanh approximation of [`ops::gelu`](crate::ops::gelu): `x * sigmoid(2 u(x))`. Scale: that of
    /// the input, whose data are multiplied by the sigmoid of the value.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use fp8_candle::scaled::Scaled;
    /// let x = Scaled::from_parts(&Tensor::new(&[-1f32, 1.0], &Device::Cpu)?, 8.0)?;
    /// let y = x.gelu()?;
    /// assert_eq!(y.scale().to_f32(), 8.0);
    /// assert!((y.to_vec1()?[1] - 8.0).abs() < 1e-5);
    /// # Ok::<(), fp8_candle::Error>(())
    /// ```
    pub fn gelu(&self) -> Result<Self> {
        self.gated("gelu", |scale| Gelu { scale }, |scale| GeluSlope { scale })
    }

    /// Sigmoid linear unit, `x * sigmoid(x)`. Scale: that of the input, whose data are multiplied by the sigmoid of the value.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use fp8_candle::scaled::Scaled;
    /// let x = Scaled::from_parts(&Tensor::new(&[0f32, 1.0], &Device::Cpu)?, 64.0)?;
    /// assert_eq!(x.silu()?.to_vec1()?, [0.0, 64.0]);
    /// # Ok::<(), fp8_candle::Error>(())
    /// ```
    pub fn silu(&self) -> Result<Self> {
        self.gated("silu", |scale| Silu { scale }, |scale| SiluSlope { scale })
    }

    /// `function` of the data, and the cotangent times `slope`, both at the scale that they have. Each is made for the factor
    /// from data to value.
    fn gated<F: Map1, S: Map2 + 'static>(
        &self,
        op: &'static str,
        function: impl FnOnce(f64) -> F,
        slope: impl FnOnce(f64) -> S,
    ) -> Result<Self> {
        let (x, scale) = sized(self)?;
        let value = Self::new(map1(op, function(scale), &x)?, self.scale());
        let slope = slope(scale);
        Ok(Self::record(value, op, [self], move |g, _| {
            let data = map2(op, slope, &x, &g.float(x.dtype())?)?;
            Ok([Some(Self::new(data, g.scale()).zeroed()?)])
        }))
    }
}

/// sqrt(2 / pi).
const LINEAR: f64 = 0.797_884_560_802_865_4;
const CUBIC: f64 = 0.044_715;

/// `d * sigmoid(2 u(scale * d))`.
#[derive(Clone, Copy)]
struct Gelu {
    scale: f64,
}

/// `g * gelu'(scale * d)`.
#[derive(Clone, Copy)]
struct GeluSlope {
    scale: f64,
}

/// `d * sigmoid(scale * d)`.
#[derive(Clone, Copy)]
struct Silu {
    scale: f64,
}

/// `g * silu'(scale * d)`.
#[derive(Clone, Copy)]
struct SiluSlope {
    scale: f64,
}

/// The sigmoid and its derivative, with an exponential that cannot overflow.
#[inline(always)]
fn sigmoid<R: Real>(x: R) -> (R, R) {
    let e = (-x.abs()).exp();
    let d = R::ONE / (R::ONE + e);
    (if x < R::ZERO { e * d } else { d }, e * d * d)
}

/// Derivatives reach 0 and 1 well within the limits; beyond them they would be Inf * 0.
#[inline(always)]
fn bounded<R: Real>(x: R, limit: f64) -> R {
    let limit = R::from_f64(limit);
    let x = if x > limit { limit } else { x };
    if x < -limit { -limit } else { x }
}

/// [`sigmoid`] in candle's operations.
fn composed_sigmoid(x: &Tensor) -> Result<(Tensor, Tensor)> {
    let e = x.abs()?.neg()?.exp()?;
    let d = (&e + 1.0)?.recip()?;
    let low = (&e * &d)?;
    let slope = (&low * &d)?;
    Ok((x.lt(0.0)?.where_cond(&low, &d)?, slope))
}

impl Map1 for Gelu {
    #[inline(always)]
    fn apply<R: Real>(self, d: R) -> R {
        let x = d * R::from_f64(self.scale);
        let (linear, cubic) = (R::from_f64(2.0 * LINEAR), R::from_f64(2.0 * LINEAR * CUBIC));
        d * sigmoid((x * x).mul_add(cubic, linear) * x).0
    }

    fn composed(self, d: &Tensor) -> Result<Tensor> {
        let x = (d * self.scale)?;
        let u = ((x.sqr()? * (2.0 * LINEAR * CUBIC))? + 2.0 * LINEAR)?.mul(&x)?;
        Ok((d * composed_sigmoid(&u)?.0)?)
    }
}

impl Map2 for GeluSlope {
    #[inline(always)]
    fn apply<R: Real>(self, d: R, g: R) -> R {
        let x = bounded(d * R::from_f64(self.scale), 32.0);
        let (linear, cubic) = (R::from_f64(2.0 * LINEAR), R::from_f64(2.0 * LINEAR * CUBIC));
        let (gate, slope) = sigmoid((x * x).mul_add(cubic, linear) * x);
        let three = R::from_f64(3.0);
        g * slope.mul_add((x * x).mul_add(cubic * three, linear) * x, gate)
    }

    fn composed(self, d: &Tensor, g: &Tensor) -> Result<Tensor> {
        let x = (d * self.scale)?.clamp(-32.0, 32.0)?;
        let u = |cubic: f64| -> Result<Tensor> {
            Ok(((x.sqr()? * (2.0 * LINEAR * CUBIC * cubic))? + 2.0 * LINEAR)?.mul(&x)?)
        };
        let (gate, slope) = composed_sigmoid(&u(1.0)?)?;
        Ok((g * (gate + (slope * u(3.0)?)?)?)?)
    }
}

impl Map1 for Silu {
    #[inline(always)]
    fn apply<R: Real>(self, d: R) -> R {
        d * sigmoid(d * R::from_f64(self.scale)).0
    }

    fn composed(self, d: &Tensor) -> Result<Tensor> {
        Ok((d * composed_sigmoid(&(d * self.scale)?)?.0)?)
    }
}

impl Map2 for SiluSlope {
    #[inline(always)]
    fn apply<R: Real>(self, d: R, g: R) -> R {
        let x = bounded(d * R::from_f64(self.scale), 200.0);
        let (gate, slope) = sigmoid(x);
        g * slope.mul_add(x, gate)
    }

    fn composed(self, d: &Tensor, g: &Tensor) -> Result<Tensor> {
        let x = (d * self.scale)?.clamp(-200.0, 200.0)?;
        let (gate, slope) = composed_sigmoid(&x)?;
        Ok((g * (gate + (slope * x)?)?)?)
    }
}

#[cfg(test)]
mod tests {
    use super::super::held::{check1, check2};
    use super::*;

    #[test]
    fn kernels_equal_their_definitions() {
        for scale in [1.0, 0.125, 32.0] {
            check1(Gelu { scale }, false);
            check1(Silu { scale }, false);
            check2(GeluSlope { scale }, false);
            check2(SiluSlope { scale }, false);
        }
    }
}
