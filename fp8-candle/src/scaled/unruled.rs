//! Operations of candle that have no rule here. They exist to say so with a typed error, where code over both kinds of tensors calls
//! them.

use super::value::Scaled;
use crate::base::error::{Error, Result};

impl Scaled {
    /// Running sums: their sizes grow along the dimension, and one scale cannot follow.
    ///
    /// # Errors
    /// [`Error::NoScaleRule`], always.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use fp8_candle::{Error, scaled::Scaled};
    /// let x = Scaled::zeros(4, DType::F32, &Device::Cpu)?;
    /// assert!(matches!(x.cumsum(0), Err(Error::NoScaleRule { op: "cumsum" })));
    /// # Ok::<(), fp8_candle::Error>(())
    /// ```
    pub fn cumsum(&self, _dim: usize) -> Result<Self> {
        Err(Error::NoScaleRule { op: "cumsum" })
    }

    /// Sorting, which has no derivative here.
    ///
    /// # Errors
    /// [`Error::NoScaleRule`], always.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[1f32, -4.0], &Device::Cpu)?, 2.0)?;
    /// assert!(matches!(x.sort_last_dim(true), Err(fp8_candle::Error::NoScaleRule { op: "sort_last_dim" })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn sort_last_dim(&self, _ascending: bool) -> Result<(Self, candle_core::Tensor)> {
        Err(Error::NoScaleRule {
            op: "sort_last_dim",
        })
    }

    /// Rounding of values down to whole numbers: what is a whole number depends on the scale.
    ///
    /// # Errors
    /// [`Error::NoScaleRule`], always.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[1f32, -4.0], &Device::Cpu)?, 2.0)?;
    /// assert!(matches!(x.floor(), Err(fp8_candle::Error::NoScaleRule { op: "floor" })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn floor(&self) -> Result<Self> {
        Err(Error::NoScaleRule { op: "floor" })
    }

    /// As [`Scaled::floor`].
    ///
    /// # Errors
    /// [`Error::NoScaleRule`], always.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[1f32, -4.0], &Device::Cpu)?, 2.0)?;
    /// assert!(matches!(x.ceil(), Err(fp8_candle::Error::NoScaleRule { op: "ceil" })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn ceil(&self) -> Result<Self> {
        Err(Error::NoScaleRule { op: "ceil" })
    }

    /// As [`Scaled::floor`].
    ///
    /// # Errors
    /// [`Error::NoScaleRule`], always.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[1f32, -4.0], &Device::Cpu)?, 2.0)?;
    /// assert!(matches!(x.round(), Err(fp8_candle::Error::NoScaleRule { op: "round" })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn round(&self) -> Result<Self> {
        Err(Error::NoScaleRule { op: "round" })
    }

    /// The remainder of a division: the quotient is a whole number, as with [`Scaled::floor`].
    ///
    /// # Errors
    /// [`Error::NoScaleRule`], always.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[1f32, -4.0], &Device::Cpu)?, 2.0)?;
    /// assert!(matches!(x.rem(&x), Err(fp8_candle::Error::NoScaleRule { op: "rem" })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn rem(&self, _divisor: &Self) -> Result<Self> {
        Err(Error::NoScaleRule { op: "rem" })
    }
}
