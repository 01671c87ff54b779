//! Elementwise loops over data: one pass over contiguous slices on the CPU, in f32 for 16-bit data with one rounding at the end;
//! composed of candle's operations elsewhere.

use crate::error::Result;
use crate::ops::data::{compute_dtype, for_dtype, map_rows, storage, with_slices};
use crate::ops::math::Real;
use crate::ready::tensor_of;
use crate::simd::simd;
use candle_core::Tensor;

/// A function of one element.
pub(super) trait Map1: Copy + Send + Sync {
    /// Must be `#[inline(always)]`.
    fn apply<R: Real>(self, x: R) -> R;

    /// The same on a tensor in the dtype of computation: the definition, and the form for other devices.
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

        impl crate::scaled::kernels::$Map for $name {
            #[inline(always)]
            fn apply<R: crate::ops::math::Real>(self, $($arg: R),+) -> R {
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

/// `f` of every element.
pub(super) fn map1(op: &'static str, f: impl Map1, x: &Tensor) -> Result<Tensor> {
    if !x.device().is_cpu() {
        return wide([x], |[x]| f.composed(x));
    }
    crate::simd::check()?;
    for_dtype!(op, x.dtype(), T => {
        let values = with_slices([x], |[x]: [&[T]; 1]| map_rows([x], 1, |_, [x], y| {
            simd(#[inline(always)] || for (y, &x) in y.iter_mut().zip(x) {
                *y = f.apply(x);
            });
        }))?;
        tensor_of(storage::<T>(values), x.shape())
    })
}

/// `f` of the elements of two tensors of one shape and dtype.
pub(super) fn map2(op: &'static str, f: impl Map2, x: &Tensor, y: &Tensor) -> Result<Tensor> {
    if !x.device().is_cpu() {
        return wide([x, y], |[x, y]| f.composed(x, y));
    }
    crate::simd::check()?;
    for_dtype!(op, x.dtype(), T => {
        let values = with_slices([x, y], |slices: [&[T]; 2]| map_rows(slices, 1, |_, [x, y], z| {
            simd(#[inline(always)] || for ((z, &x), &y) in z.iter_mut().zip(x).zip(y) {
                *z = f.apply(x, y);
            });
        }))?;
        tensor_of(storage::<T>(values), x.shape())
    })
}

/// `f` of the elements of three tensors of one shape and dtype.
pub(super) fn map3(op: &'static str, f: impl Map3, args: [&Tensor; 3]) -> Result<Tensor> {
    let [x, ..] = args;
    if !x.device().is_cpu() {
        return wide(args, |[x, y, z]| f.composed(x, y, z));
    }
    crate::simd::check()?;
    for_dtype!(op, x.dtype(), T => {
        let values = with_slices(args, |slices: [&[T]; 3]| map_rows(slices, 1, |_, [x, y, z], out| {
            simd(#[inline(always)] || for (((out, &x), &y), &z) in out.iter_mut().zip(x).zip(y).zip(z) {
                *out = f.apply(x, y, z);
            });
        }))?;
        tensor_of(storage::<T>(values), x.shape())
    })
}

/// `f` of tensors in the dtype of computation, rounded back to that of the first.
pub(super) fn wide<const N: usize>(
    args: [&Tensor; N],
    f: impl FnOnce([&Tensor; N]) -> Result<Tensor>,
) -> Result<Tensor> {
    let Some(dtype) = args.first().map(|x| x.dtype()) else {
        crate::error::internal!("an operation without arguments");
    };
    let args = args
        .into_iter()
        .map(|x| x.to_dtype(compute_dtype(dtype)))
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
        // Each product is rounded, which powers of two do not need.
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

/// `x * factor`; the tensor itself where the factor is 1, zeros where it is 0 whatever stands in `x`.
pub(super) fn times(op: &'static str, x: &Tensor, factor: f32) -> Result<Tensor> {
    match factor {
        1.0 => Ok(x.clone()),
        0.0 => Ok(x.zeros_like()?),
        factor => map1(op, Times(factor), x),
    }
}

/// Holds kernels and their definitions together, in every dtype. Parameters of the functions should be such that results of normal
/// numbers are normal numbers.
#[cfg(test)]
pub(super) mod held {
    use super::{Map1, Map2, Map3, map1, map2, map3, wide};
    use candle_core::{DType, Device, Tensor};

    /// Numbers of both signs, some equal, none small.
    fn numbers(seed: usize, dtype: DType, positive: bool) -> Tensor {
        let numbers = (0..999).map(|i| {
            let x = ((i * (37 + seed) + seed) % 61) as f32 / 16.0 - 1.9;
            if positive { x.abs() + 0.1 } else { x }
        });
        Tensor::from_iter(numbers, &Device::Cpu)
            .and_then(|x| x.to_dtype(dtype))
            .unwrap()
    }

    /// Within an ulp of a 16-bit dtype and a few of the others, relative to 1 below it.
    fn close(got: &Tensor, expected: &Tensor) {
        let tolerance = match got.dtype() {
            DType::BF16 => 1.0 / 128.0,
            DType::F16 => 1.0 / 1024.0,
            DType::F32 => 1e-6,
            _ => 1e-13,
        };
        let to_vec = |x: &Tensor| x.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
        for (got_one, expected_one) in to_vec(got).into_iter().zip(to_vec(expected)) {
            let error = (got_one - expected_one).abs() / expected_one.abs().max(1.0);
            assert!(
                error <= tolerance,
                "{:?}: {got_one} instead of {expected_one}",
                got.dtype()
            );
        }
    }

    const DTYPES: [DType; 4] = [DType::F32, DType::BF16, DType::F16, DType::F64];

    pub(in crate::scaled) fn check1(f: impl Map1, positive: bool) {
        for dtype in DTYPES {
            let x = numbers(0, dtype, positive);
            let expected = wide([&x], |[x]| f.composed(x)).unwrap();
            close(&map1("test", f, &x).unwrap(), &expected);
        }
    }

    pub(in crate::scaled) fn check2(f: impl Map2, positive: bool) {
        for dtype in DTYPES {
            let (x, y) = (numbers(0, dtype, positive), numbers(5, dtype, positive));
            let expected = wide([&x, &y], |[x, y]| f.composed(x, y)).unwrap();
            close(&map2("test", f, &x, &y).unwrap(), &expected);
        }
    }

    pub(in crate::scaled) fn check3(f: impl Map3, positive: bool) {
        for dtype in DTYPES {
            let [x, y, z] = [0, 5, 11].map(|seed| numbers(seed, dtype, positive));
            let expected = wide([&x, &y, &z], |[x, y, z]| f.composed(x, y, z)).unwrap();
            close(&map3("test", f, [&x, &y, &z]).unwrap(), &expected);
        }
    }

    #[test]
    fn the_kernels_here() {
        check1(super::Times(0.75), false);
        check2(super::Axpby { a: 0.75, b: -2.0 }, false);
        check2(super::Product(0.75), false);
        check2(super::Quotient(0.75), true);
    }
}
