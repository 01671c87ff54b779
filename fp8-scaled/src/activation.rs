//! Activations: curves that are nearly homogeneous keep the scale of their input.

use super::error::Result;
use super::parts::sized;
use super::value::Scaled;
use fp8_candle::ops::{Activation, detached};

impl Scaled {
    /// [`Activation::Gelu`](fp8_candle::ops::Activation): see [`Scaled::activation`].
    pub fn gelu(&self) -> Result<Self> {
        self.activation(Activation::Gelu)
    }

    /// [`Activation::Silu`](fp8_candle::ops::Activation): see [`Scaled::activation`].
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
        match activation {
            Activation::Relu | Activation::ReGlu => return self.relu(),
            Activation::SquaredRelu | Activation::SquaredReGlu => return self.relu()?.square(),
            Activation::Glu => return self.sigmoid(),
            _ => {}
        }
        let (x, scale) = sized(self)?;
        let value = Self::new(detached::activation(activation, &x, scale)?, self.scale());
        Ok(Self::record(
            value,
            activation.name(),
            [self],
            move |g, _| {
                let data =
                    detached::activation_gradient(activation, &x, scale, &g.float(x.dtype())?)?;
                Ok([Some(Self::new(data, g.scale()).zeroed()?)])
            },
        ))
    }
}
