//! Activations: curves that are nearly homogeneous keep the scale of their input.

use super::parts::sized;
use super::value::Scaled;
use crate::base::data::activation::{Activation, Curve};
use crate::base::error::Result;
use crate::ops::{scaled_curve, scaled_slope};

impl Scaled {
    /// [`Activation::Gelu`](crate::ops::Activation): see [`Scaled::activation`].
    pub fn gelu(&self) -> Result<Self> {
        self.activation(Activation::Gelu)
    }

    /// [`Activation::Silu`](crate::ops::Activation): see [`Scaled::activation`].
    pub fn silu(&self) -> Result<Self> {
        self.activation(Activation::Silu)
    }

    /// An activation that is not gated, or the function of the gate of one that is. The result has the scale of the input, and each
    /// gradient that of the cotangent, but for [`relu`](Scaled::relu), [`square`](Scaled::square) and [`sigmoid`](Scaled::sigmoid),
    /// whose own rules hold.
    ///
    /// # Errors
    /// If a device fails.
    pub fn activation(&self, activation: Activation) -> Result<Self> {
        let curve = match activation.curve() {
            Curve::Relu => return self.relu(),
            Curve::SquaredRelu => return self.relu()?.square(),
            Curve::Sigmoid => return self.sigmoid(),
            curve => curve,
        };
        let op = activation.name();
        let (x, scale) = sized(self)?;
        let value = Self::new(scaled_curve(op, curve, &x, scale)?, self.scale());
        Ok(Self::record(value, op, [self], move |g, _| {
            let data = scaled_slope(op, curve, &x, scale, &g.float(x.dtype())?)?;
            Ok([Some(Self::new(data, g.scale()).zeroed()?)])
        }))
    }
}
