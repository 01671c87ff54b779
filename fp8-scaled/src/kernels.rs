//! Elementwise functions of data: one pass over contiguous slices on the CPU, in f32 for 16-bit data with one rounding at the end, and
//! candle's operations on other devices.

use super::error::Result;
use candle_core::{DType, Tensor};
use fp8_candle::ops::elements::{Real, RowKernel, map_rows, map_to, wide_dtype};

/// A function of the elements of `N` tensors.
pub(super) trait Map<const N: usize>: Copy + Send + Sync {
    /// Must be `#[inline(always)]`.
    fn apply<R: Real>(self, args: [R; N]) -> R;

    /// The same on tensors in the dtype of computation: the definition, used on other devices.
    fn composed(self, args: [&Tensor; N]) -> Result<Tensor>;
}

/// Defines a [`Map`], a struct with f64 parameters: the formula on elements, and on tensors.
macro_rules! map_fn {
    ($name:ident { $($field:ident),* }, |$($arg:ident),+| $apply:expr, |$($tensor:ident),+| $composed:expr) => {
        #[derive(Clone, Copy)]
        pub(crate) struct $name {
            $(pub(crate) $field: f64),*
        }

        impl crate::kernels::Map<{ [$(stringify!($arg)),+].len() }> for $name {
            #[inline(always)]
            fn apply<R: fp8_candle::ops::elements::Real>(
                self,
                [$($arg),+]: [R; [$(stringify!($arg)),+].len()],
            ) -> R {
                $(let $field = R::from_f64(self.$field);)*
                $apply
            }

            fn composed(
                self,
                [$($tensor),+]: [&candle_core::Tensor; [$(stringify!($arg)),+].len()],
            ) -> crate::error::Result<candle_core::Tensor> {
                $(let $field = self.$field;)*
                Ok($composed)
            }
        }
    };
}
pub(super) use map_fn;

/// A [`Map`] as a kernel over rows.
pub(super) struct Each<F>(F);

macro_rules! each {
    ($($n:literal: [$($x:ident),+], $pattern:pat => $zipped:expr;)+) => {$(
        impl<F: Map<$n>> RowKernel<$n> for Each<F> {
            #[inline(always)]
            fn rows<R: Real>(&self, [$($x),+]: [&[R]; $n], out: &mut [R]) {
                for (out, $pattern) in out.iter_mut().zip($zipped) {
                    *out = self.0.apply([$(*$x),+]);
                }
            }
        }
    )+};
}
each! {
    1: [x], x => x;
    2: [x, y], (x, y) => x.iter().zip(y);
    3: [x, y, z], ((x, y), z) => x.iter().zip(y).zip(z);
}

/// `f` of the elements of tensors of one shape and dtype.
pub(super) fn map<const N: usize, F: Map<N>>(
    op: &'static str,
    f: F,
    args: [&Tensor; N],
) -> Result<Tensor>
where
    Each<F>: RowKernel<N>,
{
    match args.iter().all(|x| x.device().is_cpu()) {
        true => Ok(map_rows(op, args, 1, &Each(f))?),
        false => wide(args, |args| f.composed(args)),
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

// Each product is rounded; products with powers of two are exact.
map_fn!(Axpby { a, b }, |x, y| a * x + b * y, |x, y| ((x * a)?
    + (y * b)?)?);
map_fn!(Times { k }, |x| k * x, |x| (x * k)?);
map_fn!(Product { k }, |x, y| k * (x * y), |x, y| ((x * y)? * k)?);
map_fn!(Quotient { k }, |x, y| k * (x / y), |x, y| ((x / y)? * k)?);

/// `x * factor`; the tensor itself if the factor is 1, zeros if it is 0, whatever `x` holds. A factor of Inf, the result of scales out of
/// range, counts as the largest finite number, so that zeros stay zeros.
pub(super) fn times(op: &'static str, x: &Tensor, factor: f32) -> Result<Tensor> {
    match factor.clamp(-f32::MAX, f32::MAX) {
        1.0 => Ok(x.clone()),
        0.0 => Ok(x.zeros_like()?),
        factor => map(op, Times { k: factor.into() }, [x]),
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
