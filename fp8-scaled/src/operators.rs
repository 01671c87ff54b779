//! `+`, `-`, `*` and `/`.

use super::error::Result;
use super::value::{Scaled, as_scaled};
use candle_core::Tensor;
use std::ops::{Add, Div, Mul, Sub};

/// `a $op b` by the method of that name, for values and references on the left.
macro_rules! operator {
    ($Trait:ident, $method:ident, $constant:expr) => {
        operator!(@left &Scaled, $Trait, $method, $constant);
        operator!(@left Scaled, $Trait, $method, $constant);
    };
    (@left $Left:ty, $Trait:ident, $method:ident, $constant:expr) => {
        impl $Trait<&Scaled> for $Left {
            type Output = Result<Scaled>;

            fn $method(self, other: &Scaled) -> Self::Output {
                Scaled::$method(&self, other)
            }
        }

        impl $Trait<Scaled> for $Left {
            type Output = Result<Scaled>;

            fn $method(self, other: Scaled) -> Self::Output {
                Scaled::$method(&self, &other)
            }
        }

        /// The plain tensor counts as data of the scale 1.
        impl $Trait<&Tensor> for $Left {
            type Output = Result<Scaled>;

            fn $method(self, other: &Tensor) -> Self::Output {
                Scaled::$method(&self, &as_scaled(other, None)?)
            }
        }

        impl $Trait<f64> for $Left {
            type Output = Result<Scaled>;

            fn $method(self, constant: f64) -> Self::Output {
                let with_constant: fn(&Scaled, f64) -> Self::Output = $constant;
                with_constant(&self, constant)
            }
        }
    };
}

operator!(Add, add, Scaled::add_constant);
operator!(Sub, sub, |x, constant| x.add_constant(-constant));
operator!(Mul, mul, Scaled::mul_constant);
operator!(Div, div, Scaled::div_constant);
