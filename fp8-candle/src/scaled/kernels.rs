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
