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

    /// Applies an activation; for a gated activation, the function of its gate. The result has the scale of the input, and the gradient
    /// that of the cotangent, except where the activation is [`relu`](Scaled::relu), [`square`](Scaled::square) or
    /// [`sigmoid`](Scaled::sigmoid), which have their own rules.
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
        Ok(self.recorded(value, activation.name(), move |g| {
            let data = detached::activation_gradient(activation, &x, scale, &g.float(x.dtype())?)?;
            Self::new(data, g.scale()).zeroed()
        }))
    }
}
