//! Operations of candle that have no rule here. They exist to say so with a typed error, where code over both kinds of tensors calls
//! them.

use super::value::Scaled;
use crate::error::{Error, Result};

impl Scaled {
    /// Running sums: their sizes grow along the dimension, and one scale cannot follow.
    ///
    /// # Errors
    /// [`Error::NoScaleRule`], always.
    pub fn cumsum(&self, _dim: usize) -> Result<Self> {
        Err(Error::NoScaleRule { op: "cumsum" })
    }

    /// Sorting, which has no derivative here.
    ///
    /// # Errors
    /// [`Error::NoScaleRule`], always.
    pub fn sort_last_dim(&self, _ascending: bool) -> Result<(Self, candle_core::Tensor)> {
        Err(Error::NoScaleRule {
            op: "sort_last_dim",
        })
    }

    /// Rounding of values down to whole numbers: what is a whole number depends on the scale.
    ///
    /// # Errors
    /// [`Error::NoScaleRule`], always.
    pub fn floor(&self) -> Result<Self> {
        Err(Error::NoScaleRule { op: "floor" })
    }

    /// As [`Scaled::floor`].
    ///
    /// # Errors
    /// [`Error::NoScaleRule`], always.
    pub fn ceil(&self) -> Result<Self> {
        Err(Error::NoScaleRule { op: "ceil" })
    }

    /// As [`Scaled::floor`].
    ///
    /// # Errors
    /// [`Error::NoScaleRule`], always.
    pub fn round(&self) -> Result<Self> {
        Err(Error::NoScaleRule { op: "round" })
    }

    /// The remainder of a division: the quotient is a whole number, as with [`Scaled::floor`].
    ///
    /// # Errors
    /// [`Error::NoScaleRule`], always.
    pub fn rem(&self, _divisor: &Self) -> Result<Self> {
        Err(Error::NoScaleRule { op: "rem" })
    }
}
