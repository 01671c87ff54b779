//! Selection between values: extremes, signs, masks.

use super::arith::{Like, broadcast_dims, common_dtype, meet};
use super::check::check_same_device;
use super::error::{Result, unsupported};
use super::kernels::{map, map_fn, times};
use super::value::Scaled;
use candle_core::{DType, Tensor};
use fp8_core::scaled::{Aligned, Scale, extreme_rule};

map_fn!(Abs {}, |x| x.abs(), |x| x.abs()?);
map_fn!(
    Sign {},
    |x| {
        let sign = if x < R::ZERO { -R::ONE } else { x };
        if x > R::ZERO { R::ONE } else { sign }
    },
    |x| x.sign()?
);
map_fn!(
    Relu {},
    // NaN stays NaN.
    |x| if x < R::ZERO { R::ZERO } else { x },
    |x| x.relu()?
);
// The cotangent where the result is above 0.
map_fn!(
    ReluSlope {},
    |g, y| if y > R::ZERO { g } else { R::ZERO },
    |g, y| y.gt(0.0)?.where_cond(g, &g.zeros_like()?)?
);
map_fn!(
    AbsSlope {},
    |g, x| {
        let signed = if x < R::ZERO { -g } else { R::ZERO };
        if x > R::ZERO { g } else { signed }
    },
    |g, x| (g * x.sign()?)?
);
map_fn!(
    Maximum { a, b },
    |x, y| {
        let (x, y) = (a * x, b * y);
        // NaN in either operand gives NaN.
        let other = if x < y { y } else { x + y };
        if x >= y { x } else { other }
    },
    |x, y| (x * a)?.maximum(&(y * b)?)?
);
map_fn!(
    Minimum { a, b },
    |x, y| {
        let (x, y) = (a * x, b * y);
        let other = if x > y { y } else { x + y };
        if x <= y { x } else { other }
    },
    |x, y| (x * a)?.minimum(&(y * b)?)?
);
// The first operand's share of the cotangent: all of it where this operand is larger (`sign` 1) or smaller (-1), half of it where both
// are equal.
map_fn!(
    Share { a, b, sign },
    |g, x, y| {
        let (x, y) = (sign * a * x, sign * b * y);
        let smaller = if x < y { R::ZERO } else { g };
        if x == y {
            R::from_f64(0.5) * g
        } else {
            smaller
        }
    },
    |g, x, y| {
        let (x, y) = ((x * (sign * a))?, (y * (sign * b))?);
        let (above, equal) = (x.gt(&y)?, x.eq(&y)?);
        let zeros = g.zeros_like()?;
        (above.where_cond(g, &zeros)? + equal.where_cond(&(g * 0.5)?, &zeros)?)?
    }
);

/// A factor of 0 stands for zeros, whatever the data are: returns zeros and the factor 1.
fn factor(x: Tensor, factor: f32) -> Result<(Tensor, f64)> {
    match factor {
        0.0 => Ok((x.zeros_like()?, 1.0)),
        factor => Ok((x, factor.into())),
    }
}

impl Scaled {
    /// The magnitude, with the same scale.
    pub fn abs(&self) -> Result<Self> {
        let x = self.detach().zeroed()?;
        let value = Self::new(map("abs", Abs {}, [&x.data()?])?, self.scale());
        Ok(self.recorded(value, "abs", move |g| {
            g.sloped("abs", AbsSlope {}, &x, g.scale_factored())
        }))
    }

    /// -1, 0 or 1, with the scale 1. No gradient flows through it.
    pub fn sign(&self) -> Result<Self> {
        let data = self.detach().zeroed()?.data()?;
        Ok(Self::new(map("sign", Sign {}, [&data])?, Scale::ONE))
    }

    /// The value where it is above 0, else 0; the same scale.
    pub fn relu(&self) -> Result<Self> {
        let data = self.detach().zeroed()?.data()?;
        let value = Self::new(map("relu", Relu {}, [&data])?, self.scale());
        let (x, y) = (Like::of(self), value.clone());
        Ok(self.recorded(value, "relu", move |g| {
            let g = g.sloped("relu", ReluSlope {}, &y, g.scale_factored())?;
            x.cotangent(&g)
        }))
    }

    /// The larger of two values, shapes broadcast. Scale: the larger one. Where both are equal each takes half of the cotangent, as in
    /// candle.
    ///
    /// # Errors
    /// As [`Scaled::add`].
    pub fn maximum(&self, other: &Self) -> Result<Self> {
        self.extreme("maximum", other, 1.0)
    }

    /// The smaller of two values, by the rule of [`Scaled::maximum`].
    ///
    /// # Errors
    /// As [`Scaled::add`].
    pub fn minimum(&self, other: &Self) -> Result<Self> {
        self.extreme("minimum", other, -1.0)
    }

    fn extreme(&self, op: &'static str, other: &Self, sign: f64) -> Result<Self> {
        let rule = extreme_rule(self.scale(), other.scale());
        let (x, y) = meet(op, self, other)?;
        let [a, b] = rule.data_factors;
        let ((x, a), (y, b)) = (factor(x, a)?, factor(y, b)?);
        let data = match sign < 0.0 {
            true => map(op, Minimum { a, b }, [&x, &y])?,
            false => map(op, Maximum { a, b }, [&x, &y])?,
        };
        let value = Self::new(data, rule.scale).zeroed()?;
        let (like_x, like_y) = (Like::of(self), Like::of(other));
        Ok(Self::record(value, op, [self, other], move |g, wanted| {
            let data = g.float(x.dtype())?;
            let share = |like: &Like, slope: Share, x: &Tensor, y: &Tensor| {
                let share = map(op, slope, [&data, x, y])?;
                like.cotangent(&Self::new(share, g.scale()).zeroed()?)
            };
            let [want_x, want_y] = wanted;
            Ok([
                want_x
                    .then(|| share(&like_x, Share { a, b, sign }, &x, &y))
                    .transpose()?,
                want_y
                    .then(|| share(&like_y, Share { a: b, b: a, sign }, &y, &x))
                    .transpose()?,
            ])
        }))
    }

    /// `on_true` where `mask`, a U8 tensor, is not 0, else `on_false`; shapes broadcast. Scale: the larger one.
    ///
    /// # Errors
    /// [`fp8_candle::Error::DType`] if the mask is not U8; as [`Scaled::add`].
    pub fn where_cond(mask: &Tensor, on_true: &Self, on_false: &Self) -> Result<Self> {
        let op = "where_cond";
        if mask.dtype() != DType::U8 {
            return Err(unsupported(op, "the mask", "u8", mask.dtype()));
        }
        check_same_device(op, on_true, on_false)?;
        let dims = broadcast_dims(op, on_true.dims(), on_false.dims())?;
        let dims = broadcast_dims(op, &dims, mask.dims())?;
        let Aligned {
            scale,
            data_factors: [a, b],
            ..
        } = extreme_rule(on_true.scale(), on_false.scale());
        let dtype = common_dtype(on_true, on_false);
        let spread = |x: &Tensor| x.broadcast_as(dims.as_slice())?.contiguous();
        let mask = spread(&mask.detach())?;
        let x = spread(&times(op, &on_true.float(dtype)?, a)?)?;
        let y = spread(&times(op, &on_false.float(dtype)?, b)?)?;
        let value = Self::new(mask.where_cond(&x, &y)?, scale);
        let (like_x, like_y) = (Like::of(on_true), Like::of(on_false));
        let parents = [on_true, on_false];
        Ok(Self::record(value, op, parents, move |g, wanted| {
            let g_data = g.float(dtype)?.contiguous()?;
            let zeros = g_data.zeros_like()?;
            let part =
                |like: &Like, of: Tensor| like.cotangent(&Self::new(of, g.scale()).zeroed()?);
            let [want_x, want_y] = wanted;
            Ok([
                want_x
                    .then(|| part(&like_x, mask.where_cond(&g_data, &zeros)?))
                    .transpose()?,
                want_y
                    .then(|| part(&like_y, mask.where_cond(&zeros, &g_data)?))
                    .transpose()?,
            ])
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::kernel_tests::check;
    use super::*;

    #[test]
    fn kernels_and_their_definitions() {
        let (a, b) = (0.5, 1.0);
        check(Abs {}, false);
        check(Sign {}, false);
        check(Relu {}, false);
        check(ReluSlope {}, false);
        check(AbsSlope {}, false);
        check(Maximum { a, b }, false);
        check(Minimum { a, b }, false);
        for sign in [1.0, -1.0] {
            // With equal factors some elements are equal.
            check(Share { a: 1.0, b, sign }, false);
            check(Share { a, b, sign }, false);
        }
    }
}
