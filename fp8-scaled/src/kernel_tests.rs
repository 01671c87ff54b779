//! Compares kernels with their definitions in every dtype. Choose parameters for which the results are normal numbers.

use super::kernels::{Axpby, Each, Map, Product, Quotient, Times, map};
use candle_core::{DType, Device, Tensor};
use fp8_candle::ops::elements::{Real, RowKernel};
use fp8_test_support::approx::{Approx, assert_within};
use fp8_test_support::{flat64, rounding::UNIT};
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

/// A number that knows how far it may be off. A kernel that computes with it tells the bound of its own result.
#[derive(Debug, Clone, Copy)]
struct Tracked(Approx);

impl PartialEq for Tracked {
    fn eq(&self, other: &Self) -> bool {
        self.0.value == other.0.value
    }
}

impl PartialOrd for Tracked {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        self.0.value.partial_cmp(&other.0.value)
    }
}

macro_rules! operators {
    ($($trait:ident $method:ident),*) => {$(
        impl $trait for Tracked {
            type Output = Self;

            fn $method(self, other: Self) -> Self {
                Self($trait::$method(self.0, other.0))
            }
        }
    )*};
}
operators!(Add add, Sub sub, Mul mul, Div div);

impl Neg for Tracked {
    type Output = Self;

    fn neg(self) -> Self {
        Self(Approx {
            value: -self.0.value,
            ..self.0
        })
    }
}

impl AddAssign for Tracked {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Tracked {
    const fn exact(value: f64) -> Self {
        Self(Approx { value, error: 0.0 })
    }
}

impl Real for Tracked {
    const ZERO: Self = Self::exact(0.0);
    const ONE: Self = Self::exact(1.0);
    const NEG_INFINITY: Self = Self::exact(f64::NEG_INFINITY);

    fn from_f64(x: f64) -> Self {
        Self(Approx::constant(x))
    }

    fn to_f64(self) -> f64 {
        self.0.value
    }

    fn mul_add(self, a: Self, b: Self) -> Self {
        self * a + b
    }

    fn sqrt(self) -> Self {
        Self(self.0.sqrt())
    }

    fn ln(self) -> Self {
        Self(self.0.ln())
    }

    fn abs(self) -> Self {
        Self(self.0.abs())
    }

    fn exp(self) -> Self {
        Self(self.0.exp())
    }

    /// A function of a mathematical library, within an ulp, which is two roundings.
    fn by(self, (_, f): (impl Fn(f32) -> f32, impl Fn(f64) -> f64)) -> Self {
        let Approx { value, error } = self.0;
        let result = f(value);
        let moved = |by: f64| (f(value + by * error * UNIT) - result).abs() / UNIT;
        let error = moved(1.0).max(moved(-1.0));
        let off = Approx {
            value: result,
            error,
        };
        Self(off.rounded(2.0))
    }
}

/// Numbers of both signs, some of them equal, none close to 0.
fn numbers(seed: usize, dtype: DType, positive: bool) -> Tensor {
    let numbers = (0..999).map(|i| {
        let x = ((i * (37 + seed) + seed) % 61) as f32 / 16.0 - 1.9;
        if positive { x.abs() + 0.1 } else { x }
    });
    Tensor::from_iter(numbers, &Device::Cpu)
        .and_then(|x| x.to_dtype(dtype))
        .unwrap()
}

const DTYPES: [DType; 4] = [DType::F32, DType::BF16, DType::F16, DType::F64];

/// The kernel of `f` against its definition in f64, within the error that the kernel itself computes for each element.
pub(super) fn check<const N: usize, F: Map<N>>(f: F, positive: bool)
where
    Each<F>: RowKernel<N>,
{
    for dtype in DTYPES {
        let args: [Tensor; N] = std::array::from_fn(|i| numbers([0, 5, 11][i], dtype, positive));
        let exact = args.each_ref().map(|x| x.to_dtype(DType::F64).unwrap());
        let values = args.each_ref().map(flat64);
        let definition = flat64(&f.composed(exact.each_ref()).unwrap());
        let expected = definition
            .into_iter()
            .enumerate()
            .map(|(at, value)| Approx {
                value,
                ..f.apply(values.each_ref().map(|x| Tracked::exact(x[at]))).0
            });
        let got = flat64(&map("test", f, args.each_ref()).unwrap());
        assert_within(&got, &expected.collect::<Vec<_>>(), dtype, "the kernel");
    }
}

#[test]
fn the_kernels_here() {
    let k = 0.75;
    check(Times { k }, false);
    check(Axpby { a: k, b: -2.0 }, false);
    check(Product { k }, false);
    check(Quotient { k }, true);
}
