//! Addition, subtraction, multiplication and division, with tensors and constants.

use super::check::check_same_device;
use super::dtype::ScaledDType;
use super::error::{Result, shape};
use super::kernels::{Axpby, Product, Quotient, Times, map, map_fn, times};
use super::options::Options;
use super::value::{Data, Scaled};
use candle_core::{DType, Tensor};
use fp8_core::scaled::{Aligned, Factored, Scale, add_rule, constant_rule, div_rule, mul_rule};

/// The dtype in which two operands are combined: a shared dtype stays, bf16 and f16 give f32, otherwise the wider one wins. FP8 takes the
/// other operand's dtype; two FP8 operands give f16.
pub(super) fn common_dtype(a: &Scaled, b: &Scaled) -> DType {
    common(a.dtype(), b.dtype())
}

/// [`common_dtype`] of two dtypes.
pub(super) fn common(a: ScaledDType, b: ScaledDType) -> DType {
    match (a, b) {
        (ScaledDType::Float(a), ScaledDType::Fp8(_))
        | (ScaledDType::Fp8(_), ScaledDType::Float(a)) => a,
        (ScaledDType::Float(a), ScaledDType::Float(b)) if a == b => a,
        (ScaledDType::Float(DType::F64), _) | (_, ScaledDType::Float(DType::F64)) => DType::F64,
        (ScaledDType::Float(_), ScaledDType::Float(_)) => DType::F32,
        (ScaledDType::Fp8(_), ScaledDType::Fp8(_)) => DType::F16,
    }
}

/// The shape to which both broadcast.
pub(super) fn broadcast_dims(op: &'static str, a: &[usize], b: &[usize]) -> Result<Vec<usize>> {
    let rank = a.len().max(b.len());
    let size = |dims: &[usize], i: usize| (i + dims.len()).checked_sub(rank).map_or(1, |i| dims[i]);
    (0..rank)
        .map(|i| match (size(a, i), size(b, i)) {
            (a, b) if a == b => Ok(a),
            (1, b) => Ok(b),
            (a, 1) => Ok(a),
            _ => Err(shape(
                op,
                "the second operand",
                format!("a shape that broadcasts with {a:?}"),
                b,
            )),
        })
        .collect()
}

/// The data of both operands, broadcast to one shape and in one dtype.
pub(super) fn meet(op: &'static str, a: &Scaled, b: &Scaled) -> Result<(Tensor, Tensor)> {
    check_same_device(op, a, b)?;
    let (dtype, dims) = (common_dtype(a, b), broadcast_dims(op, a.dims(), b.dims())?);
    let spread = |x: &Scaled| -> Result<Tensor> {
        let data = x.float(dtype)?;
        match data.dims() == dims {
            true => Ok(data),
            false => Ok(data.broadcast_as(dims.as_slice())?.contiguous()?),
        }
    };
    Ok((spread(a)?, spread(b)?))
}

/// The sum of two tensors of one shape and dtype under the factors of a rule.
pub(super) fn weighted_sum(
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    rule: &Aligned,
    sign: f32,
) -> Result<Tensor> {
    let [ka, kb] = rule.data_factors;
    let is_power = |k: f32| k == 0.0 || Scale::new(k).is_ok();
    if a.dtype() != DType::F32 && !(is_power(ka) && is_power(kb)) {
        // Round each step to the dtype of the data, as the original library does. Powers of two are exact either way.
        let rounded = |x: &Tensor, k: f32| -> Result<Tensor> {
            let k = Tensor::new(k, x.device())?.to_dtype(x.dtype())?;
            times(op, x, k.to_dtype(DType::F32)?.to_scalar()?)
        };
        let (a, b, plain) = (rounded(a, ka)?, rounded(b, kb)?, [1.0, sign]);
        return axpby(op, plain, [&a, &b]);
    }
    match (ka, kb) {
        // A tensor of zero scale counts as zeros, whatever data it holds.
        (_, 0.0) => times(op, a, ka),
        (0.0, _) => times(op, b, sign * kb),
        _ => axpby(op, [ka, sign * kb], [a, b]),
    }
}

/// `k * x + l * y`.
fn axpby(op: &'static str, factors: [f32; 2], data: [&Tensor; 2]) -> Result<Tensor> {
    let [a, b] = factors.map(f64::from);
    map(op, Axpby { a, b }, data)
}

impl Scaled {
    /// `self + other`, shapes broadcast. Scale: `r(sqrt(a^2 + b^2))`, the larger of two powers of two.
    ///
    /// # Errors
    /// If the shapes do not broadcast or the devices differ.
    pub fn add(&self, other: &Self) -> Result<Self> {
        self.sum_or_difference("add", other, 1.0)
    }

    /// `self - other`, by the rule of [`Scaled::add`].
    ///
    /// # Errors
    /// As [`Scaled::add`].
    pub fn sub(&self, other: &Self) -> Result<Self> {
        self.sum_or_difference("sub", other, -1.0)
    }

    fn sum_or_difference(&self, op: &'static str, other: &Self, sign: f32) -> Result<Self> {
        let rule = add_rule(self.scale(), other.scale(), Options::current().round());
        let (a, b) = meet(op, self, other)?;
        let value = Self::new(weighted_sum(op, &a, &b, &rule, sign)?, rule.scale);
        let (a_like, b_like) = (Like::of(self), Like::of(other));
        Ok(Self::record(
            value,
            op,
            [self, other],
            move |g, [want_a, want_b]| {
                let signed = |g: &Self| if sign < 0.0 { g.neg() } else { Ok(g.clone()) };
                Ok([
                    want_a.then(|| a_like.cotangent(g)).transpose()?,
                    want_b.then(|| b_like.cotangent(&signed(g)?)).transpose()?,
                ])
            },
        ))
    }

    /// `self * other`, shapes broadcast. Scale: the product of the scales.
    ///
    /// # Errors
    /// As [`Scaled::add`].
    pub fn mul(&self, other: &Self) -> Result<Self> {
        let op = "mul";
        let rule = mul_rule(self.scale(), other.scale());
        let (a, b) = meet(op, self, other)?;
        let k = rule.data_factor.into();
        let value = Self::new(map(op, Product { k }, [&a, &b])?, rule.scale).zeroed()?;
        let (a_like, b_like) = (Like::of(self), Like::of(other));
        // Each gradient needs the other operand.
        let (a, b) = (
            other.is_tracked().then(|| self.detach()),
            self.is_tracked().then(|| other.detach()),
        );
        Ok(Self::record(value, op, [self, other], move |g, _| {
            let grad = |like: &Like, other: &Self| like.cotangent(&g.mul(other)?);
            Ok([
                b.as_ref().map(|b| grad(&a_like, b)).transpose()?,
                a.as_ref().map(|a| grad(&b_like, a)).transpose()?,
            ])
        }))
    }

    /// `self / other`, shapes broadcast. Scale: the quotient of the scales.
    ///
    /// # Errors
    /// As [`Scaled::add`], and if `other` has a zero scale.
    pub fn div(&self, other: &Self) -> Result<Self> {
        let op = "div";
        let rule = div_rule(self.scale(), other.scale())?;
        let (a, b) = meet(op, self, other)?;
        let k = rule.data_factor.into();
        let value = Self::new(map(op, Quotient { k }, [&a, &b])?, rule.scale).zeroed()?;
        let (a, b, y) = (Like::of(self), other.detach(), value.clone());
        Ok(Self::record(
            value,
            op,
            [self, other],
            move |g, [want_a, want_b]| {
                let over_b = g.div(&b)?;
                let grad_b = || Like::of(&b).cotangent(&over_b.mul(&y)?.neg()?);
                Ok([
                    want_a.then(|| a.cotangent(&over_b)).transpose()?,
                    want_b.then(grad_b).transpose()?,
                ])
            },
        ))
    }

    /// `self * constant`. Scale: `s` times the power of two of the constant, as for [`Scaled::mul`] with [`Scaled::constant`]. A power
    /// of two therefore changes only the scale.
    pub fn mul_constant(&self, constant: f64) -> Result<Self> {
        let (power, mantissa) = split(constant);
        let rule = mul_rule(self.scale(), power);
        self.times_constant("mul_constant", constant, rule, mantissa)
    }

    /// `self / constant`, the inverse of [`Scaled::mul_constant`].
    ///
    /// # Errors
    /// If the constant is 0.
    pub fn div_constant(&self, constant: f64) -> Result<Self> {
        let (power, mantissa) = split(constant);
        let rule = div_rule(self.scale(), power)?;
        self.times_constant("div_constant", 1.0 / constant, rule, 1.0 / mantissa)
    }

    /// `self * constant`, where `rule` already includes the constant's power of two.
    fn times_constant(
        &self,
        op: &'static str,
        constant: f64,
        rule: Factored,
        mantissa: f64,
    ) -> Result<Self> {
        let k = mantissa * f64::from(rule.data_factor);
        let value = match k == 1.0 {
            true => self.at(rule.scale),
            false => Self::new(map(op, Times { k }, [&self.data()?])?, rule.scale),
        };
        let like = Like::of(self);
        Ok(self.recorded(value.zeroed()?, op, move |g| {
            like.cotangent(&g.mul_constant(constant)?)
        }))
    }

    /// `self + constant`: [`Scaled::add`] of [`Scaled::constant`].
    pub fn add_constant(&self, constant: f64) -> Result<Self> {
        let op = "add_constant";
        let (power, mantissa) = split(constant);
        let rule = add_rule(self.scale(), power, Options::current().round());
        let [k, by] = rule.data_factors.map(f64::from);
        let data = match k {
            0.0 => self.data()?.zeros_like()?,
            _ => self.data()?,
        };
        let by = by * mantissa;
        let value = Self::new(map(op, Affine { k, by }, [&data])?, rule.scale);
        let like = Like::of(self);
        Ok(self.recorded(value, op, move |g| like.cotangent(g)))
    }

    /// `-self`, with the same scale.
    pub fn neg(&self) -> Result<Self> {
        let data = map("neg", Negated {}, [&self.data()?])?;
        let value = Self::new(data, self.scale());
        Ok(self.recorded(value, "neg", |g| g.neg()))
    }

    /// Replaces the data by zeros if the scale is 0: such data have no meaning.
    pub(super) fn zeroed(self) -> Result<Self> {
        match (self.scale().is_zero(), &self.data) {
            (true, Data::Float(data)) => Ok(Self::new(data.zeros_like()?, self.scale())),
            _ => Ok(self),
        }
    }
}

map_fn!(Negated {}, |x| -x, |x| x.neg()?);
map_fn!(Affine { k, by }, |x| k * x + by, |x| x.affine(k, by)?);

/// A constant as a power of two and a mantissa in f64.
fn split(constant: f64) -> (Scale, f64) {
    let (power, mantissa) = constant_rule(constant);
    match power.is_zero() {
        true => (power, mantissa.into()),
        false => (power, constant / f64::from(power.to_f32())),
    }
}

/// The shape and dtype that a cotangent must have: those of its argument.
#[derive(Debug, Clone)]
pub(super) struct Like {
    dims: Vec<usize>,
    dtype: DType,
    /// FP8 cannot hold sums, so the cotangent of an FP8 argument keeps the dtype in which it was computed.
    is_fp8: bool,
}

impl Like {
    pub(super) fn of(x: &Scaled) -> Self {
        Self {
            dims: x.dims().to_vec(),
            dtype: x.compute_dtype(),
            is_fp8: x.codes().is_some(),
        }
    }

    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(super) fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Sums `g` over broadcast dimensions and casts it to the argument's dtype. FP8 cotangents stay FP8 where nothing is summed.
    pub(super) fn cotangent(&self, g: &Scaled) -> Result<Scaled> {
        let mut g = g.detach();
        if g.dims() != self.dims {
            let extra = g.rank().saturating_sub(self.dims.len());
            let summed: Vec<usize> = (0..g.rank())
                .filter(|&i| i < extra || self.dims[i - extra] == 1 && g.dims()[i] != 1)
                .collect();
            g = g.sum_keepdim(&summed)?.reshape(&self.dims)?;
        }
        match g.dtype() {
            ScaledDType::Float(_) if !self.is_fp8 => g.astype(self.dtype),
            _ => Ok(g),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::kernel_tests::check;
    use super::*;

    #[test]
    fn kernels_and_their_definitions() {
        let (k, by) = (0.75, -1.5);
        check(Negated {}, false);
        check(Affine { k, by }, false);
    }
}
