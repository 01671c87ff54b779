//! candle_nn's activations on arrays.

use crate::array::{Array, Layer};
use crate::error::Result;
use candle_core::Module;
use candle_nn::Activation;
use fp8_candle::ops;
use fp8_scaled::Scaled;

impl<A: Array> Layer<A> for Activation {
    /// On scaled tensors [`fp8_scaled::Error::NoScaleRule`] for activations without a rule.
    fn apply(&self, x: &A) -> Result<A> {
        let own = *self;
        x.by_kind(
            |x| Ok(own.forward(x)?),
            |x| scaled(own, x),
            |x| x.function(move |x| Ok(own.forward(x)?)),
        )
    }
}

fn scaled(activation: Activation, x: &Scaled) -> Result<Scaled> {
    Ok(match activation {
        Activation::Relu => x.relu()?,
        Activation::Relu2 => x.activation(ops::Activation::SquaredRelu)?,
        Activation::NewGelu | Activation::GeluPytorchTanh => x.gelu()?,
        Activation::Silu | Activation::Swish => x.silu()?,
        Activation::Sigmoid => x.sigmoid()?,
        Activation::Gelu => x.activation(ops::Activation::GeluErf)?,
        _ => return Err(fp8_scaled::Error::NoScaleRule { op: "activation" }.into()),
    })
}
