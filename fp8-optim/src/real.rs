//! The arithmetic that formulas are written in: f32 registers of the CPU, or candle's operations on whole tensors.

use std::ops::{Add, Div, Mul, Sub};
use std::sync::Arc;

use candle_core::{Error, Result, Tensor};

/// What a formula computes with. The same formula runs over the elements of host memory (`f32`) and over tensors of any dtype and
/// device (candle tensors), with the same bits.
pub trait Real:
    Clone + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self> + Sized
{
    /// A hyperparameter, rounded as candle rounds its scalar operands.
    type Number: Copy + Send + Sync;

    /// Rounds a hyperparameter.
    fn number(x: f64) -> Self::Number;
    /// The product with a hyperparameter.
    fn times(self, factor: Self::Number) -> Self;
    /// The sum with a hyperparameter.
    fn plus(self, term: Self::Number) -> Self;
    /// The square root.
    fn sqrt(self) -> Self;
}

impl Real for f32 {
    type Number = f32;

    #[inline(always)]
    fn number(x: f64) -> f32 {
        x as f32
    }
    #[inline(always)]
    fn times(self, factor: f32) -> f32 {
        self * factor
    }
    #[inline(always)]
    fn plus(self, term: f32) -> f32 {
        self + term
    }
    #[inline(always)]
    fn sqrt(self) -> f32 {
        f32::sqrt(self)
    }
}

/// A tensor, or the first error on the way to it. Operations run at once.
#[derive(Clone, Debug)]
pub struct TensorExpr(std::result::Result<Tensor, Arc<Error>>);

impl From<Tensor> for TensorExpr {
    fn from(tensor: Tensor) -> Self {
        Self(Ok(tensor))
    }
}

impl TensorExpr {
    /// The tensor.
    ///
    /// # Errors
    /// candle's, from the operation that failed first.
    pub fn tensor(self) -> Result<Tensor> {
        self.0
            .map_err(|error| Arc::try_unwrap(error).unwrap_or_else(Error::wrap))
    }

    fn map(self, f: impl FnOnce(Tensor) -> Result<Tensor>) -> Self {
        Self(self.0.and_then(|tensor| f(tensor).map_err(Arc::new)))
    }

    fn zip(self, other: Self, f: impl FnOnce(Tensor, Tensor) -> Result<Tensor>) -> Self {
        match other.0 {
            Ok(other) => self.map(|tensor| f(tensor, other)),
            Err(error) => Self(self.0.and(Err(error))),
        }
    }
}

impl Real for TensorExpr {
    type Number = f64;

    fn number(x: f64) -> f64 {
        x
    }
    fn times(self, factor: f64) -> Self {
        self.map(|tensor| tensor * factor)
    }
    fn plus(self, term: f64) -> Self {
        self.map(|tensor| tensor + term)
    }
    fn sqrt(self) -> Self {
        self.map(|tensor| tensor.sqrt())
    }
}

macro_rules! operators {
    ($($operator:ident $method:ident;)+) => {$(
        impl $operator for TensorExpr {
            type Output = Self;

            fn $method(self, other: Self) -> Self {
                self.zip(other, |a, b| a.$method(b))
            }
        }
    )+};
}
operators! { Add add; Sub sub; Mul mul; Div div; }
