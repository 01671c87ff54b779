//! Elementwise functions of data: one pass over contiguous slices on the CPU, in f32 for 16-bit data with one rounding at the end, and
//! candle's operations on other devices.

use super::error::Result;
use candle_core::{DType, Tensor};
use fp8_candle::ops::elements::{Real, RowKernel, map_rows, map_to, wide_dtype};

/// A function of one element.
pub(super) trait Map1: Copy + Send + Sync {
    /// Must be `#[inline(always)]`.
    fn apply<R: Real>(self, x: R) -> R;

    /// The same on a tensor in the dtype of computation: the definition, used on other devices.
    fn composed(self, x: &Tensor) -> Result<Tensor>;
}

/// A function of two elements.
pub(super) trait Map2: Copy + Send + Sync {
    /// Must be `#[inline(always)]`.
    fn apply<R: Real>(self, x: R, y: R) -> R;

    /// As [`Map1::composed`].
    fn composed(self, x: &Tensor, y: &Tensor) -> Result<Tensor>;
}

/// A function of three elements.
pub(super) trait Map3: Copy + Send + Sync {
    /// Must be `#[inline(always)]`.
    fn apply<R: Real>(self, x: R, y: R, z: R) -> R;

    /// As [`Map1::composed`].
    fn composed(self, x: &Tensor, y: &Tensor, z: &Tensor) -> Result<Tensor>;
}

/// Defines a [`Map1`], [`Map2`] or [`Map3`] of a struct with f64 parameters: the formula on elements, and on tensors.
macro_rules! map_fn {
    (@of $Map:ident, $name:ident { $($field:ident),* }, |$($arg:ident),+| $apply:expr, |$($tensor:ident),+| $composed:expr) => {
        #[derive(Clone, Copy)]
        struct $name {
            $($field: f64),*
        }

        impl crate::kernels::$Map for $name {
            #[inline(always)]
            fn apply<R: fp8_candle::ops::elements::Real>(self, $($arg: R),+) -> R {
                $(let $field = R::from_f64(self.$field);)*
                $apply
            }

            fn composed(self, $($tensor: &candle_core::Tensor),+) -> crate::error::Result<candle_core::Tensor> {
                $(let $field = self.$field;)*
                Ok($composed)
            }
        }
    };
    ($name:ident { $($field:ident),* }, |$x:ident| $apply:expr, |$t:ident| $composed:expr) => {
        map_fn!(@of Map1, $name { $($field),* }, |$x| $apply, |$t| $composed);
    };
    ($name:ident { $($field:ident),* }, |$x:ident, $y:ident| $apply:expr, |$t:ident, $u:ident| $composed:expr) => {
        map_fn!(@of Map2, $name { $($field),* }, |$x, $y| $apply, |$t, $u| $composed);
    };
    ($name:ident { $($field:ident),* }, |$x:ident, $y:ident, $z:ident| $apply:expr, |$t:ident, $u:ident, $v:ident| $composed:expr) => {
        map_fn!(@of Map3, $name { $($field),* }, |$x, $y, $z| $apply, |$t, $u, $v| $composed);
    };
}
pub(super) use map_fn;

/// A [`Map1`], [`Map2`] or [`Map3`] as a kernel over rows.
struct Each<F>(F);

impl<F: Map1> RowKernel<1> for Each<F> {
    #[inline(always)]
    fn rows<R: Real>(&self, [x]: [&[R]; 1], out: &mut [R]) {
        for (out, &x) in out.iter_mut().zip(x) {
            *out = self.0.apply(x);
        }
    }
}

impl<F: Map2> RowKernel<2> for Each<F> {
    #[inline(always)]
    fn rows<R: Real>(&self, [x, y]: [&[R]; 2], out: &mut [R]) {
        for ((out, &x), &y) in out.iter_mut().zip(x).zip(y) {
            *out = self.0.apply(x, y);
        }
    }
}

impl<F: Map3> RowKernel<3> for Each<F> {
    #[inline(always)]
    fn rows<R: Real>(&self, [x, y, z]: [&[R]; 3], out: &mut [R]) {
        for (((out, &x), &y), &z) in out.iter_mut().zip(x).zip(y).zip(z) {
            *out = self.0.apply(x, y, z);
        }
    }
}

/// `f` of every element.
pub(super) fn map1(op: &'static str, f: impl Map1, x: &Tensor) -> Result<Tensor> {
    match x.device().is_cpu() {
        true => Ok(map_rows(op, [x], 1, &Each(f))?),
        false => wide([x], |[x]| f.composed(x)),
    }
}

/// `f` of the elements of two tensors of one shape and dtype.
pub(super) fn map2(op: &'static str, f: impl Map2, x: &Tensor, y: &Tensor) -> Result<Tensor> {
    match x.device().is_cpu() {
        true => Ok(map_rows(op, [x, y], 1, &Each(f))?),
        false => wide([x, y], |[x, y]| f.composed(x, y)),
    }
}

/// `f` of the elements of three tensors of one shape and dtype.
pub(super) fn map3(op: &'static str, f: impl Map3, args: [&Tensor; 3]) -> Result<Tensor> {
    match args[0].device().is_cpu() {
        true => Ok(map_rows(op, args, 1, &Each(f))?),
        false => wide(args, |[x, y, z]| f.composed(x, y, z)),
    }
}

/// `f` of tensors in the dtype of computation, rounded back to that of the first.
pub(super) fn wide<const N: usize>(
    args: [&Tensor; N],
    f: impl FnOnce([&Tensor; N]) -> Result<Tensor>,
) -> Result<Tensor> {
    let Some(dtype) = args.first().map(|x| x.dtype()) else {
        super::error::internal!("an operation without arguments");
    };
    let args = args
        .into_iter()
        .map(|x| x.to_dtype(wide_dtype(dtype)))
        .collect::<candle_core::Result<Vec<_>>>()?;
    let refs: [&Tensor; N] = std::array::from_fn(|i| &args[i]);
    Ok(f(refs)?.to_dtype(dtype)?)
}

/// `a * x + b * y`.
#[derive(Clone, Copy)]
pub(super) struct Axpby {
    pub(super) a: f32,
    pub(super) b: f32,
}

impl Map2 for Axpby {
    #[inline(always)]
    fn apply<R: Real>(self, x: R, y: R) -> R {
        let (a, b) = (R::from_f64(self.a.into()), R::from_f64(self.b.into()));
        // Each product is rounded; products with powers of two are exact.
        a * x + b * y
    }

    fn composed(self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        Ok(((x * f64::from(self.a))? + (y * f64::from(self.b))?)?)
    }
}

/// `factor * x`.
#[derive(Clone, Copy)]
pub(super) struct Times(pub(super) f32);

impl Map1 for Times {
    #[inline(always)]
    fn apply<R: Real>(self, x: R) -> R {
        R::from_f64(self.0.into()) * x
    }

    fn composed(self, x: &Tensor) -> Result<Tensor> {
        Ok((x * f64::from(self.0))?)
    }
}

/// `factor * x * y`.
#[derive(Clone, Copy)]
pub(super) struct Product(pub(super) f32);

impl Map2 for Product {
    #[inline(always)]
    fn apply<R: Real>(self, x: R, y: R) -> R {
        R::from_f64(self.0.into()) * (x * y)
    }

    fn composed(self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        Ok(((x * y)? * f64::from(self.0))?)
    }
}

/// `factor * x / y`.
#[derive(Clone, Copy)]
pub(super) struct Quotient(pub(super) f32);

impl Map2 for Quotient {
    #[inline(always)]
    fn apply<R: Real>(self, x: R, y: R) -> R {
        R::from_f64(self.0.into()) * (x / y)
    }

    fn composed(self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        Ok(((x / y)? * f64::from(self.0))?)
    }
}

/// `x * factor`; the tensor itself if the factor is 1, zeros if it is 0, whatever `x` holds. A factor of Inf, the result of scales out of
/// range, counts as the largest finite number, so that zeros stay zeros.
pub(super) fn times(op: &'static str, x: &Tensor, factor: f32) -> Result<Tensor> {
    match factor.clamp(-f32::MAX, f32::MAX) {
        1.0 => Ok(x.clone()),
        0.0 => Ok(x.zeros_like()?),
        factor => map1(op, Times(factor), x),
    }
}

/// `x * factor` in `dtype`, rounded once. A factor of Inf counts as the largest finite number.
pub(super) fn convert(op: &'static str, x: &Tensor, factor: f32, dtype: DType) -> Result<Tensor> {
    let factor = factor.clamp(-f32::MAX, f32::MAX);
    if x.dtype() == dtype {
        return times(op, x, factor);
    }
    let is_f32_or_less = |dtype| matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
    if !x.device().is_cpu() || !is_f32_or_less(x.dtype()) || !is_f32_or_less(dtype) {
        let wider = if x.dtype() == DType::F64 || dtype == DType::F64 {
            DType::F64
        } else {
            DType::F32
        };
        return Ok(times(op, &x.to_dtype(wider)?, factor)?.to_dtype(dtype)?);
    }
    Ok(map_to(op, x, dtype, &Converted(factor))?)
}

/// `factor * x`; zeros if the factor is 0, whatever `x` is, as in [`times`].
struct Converted(f32);

impl RowKernel<1> for Converted {
    #[inline(always)]
    fn rows<R: Real>(&self, [x]: [&[R]; 1], out: &mut [R]) {
        let factor = R::from_f64(self.0.into());
        for (out, &x) in out.iter_mut().zip(x) {
            *out = if factor == R::ZERO {
                R::ZERO
            } else {
                x * factor
            };
        }
    }
}

/// 1000 f64 values without a pattern, from -4 to 4, zeros among them.
#[cfg(test)]
pub(super) fn test_values(seed: usize) -> Result<Tensor> {
    let value = |i: usize| match i % 50 {
        0 => 0.0,
        _ => 4.0 * (((i + 7) * (2 * seed + 9)) as f64 * 12.9898).sin(),
    };
    let values: Vec<f64> = (0..1000).map(value).collect();
    Ok(Tensor::new(values, &candle_core::Device::Cpu)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_are_those_of_candle_with_a_factor() -> Result<()> {
        let x = test_values(1)?;
        for from in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            for to in [DType::F64, DType::F32, DType::F16, DType::BF16] {
                let x = x.to_dtype(from)?;
                let wide = (x.to_dtype(DType::F64)? * 0.25)?;
                let expected = wide.to_dtype(DType::F32)?.to_dtype(to)?;
                let expected = if to == DType::F64 { wide } else { expected };
                let got = convert("test", &x, 0.25, to)?;
                let flat = |x: &Tensor| x.to_dtype(DType::F64)?.to_vec1::<f64>();
                assert_eq!(flat(&got)?, flat(&expected)?, "{from:?} to {to:?}");
                let zeros = convert("test", &(x * f64::INFINITY)?, 0.0, to)?;
                assert!(flat(&zeros)?.iter().all(|&x| x == 0.0));
            }
        }
        Ok(())
    }
}
