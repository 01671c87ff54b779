//! The language model as the host of adapters.

use super::{Feedforward, Layer, Llama};
use crate::models::adapters::{Adapters, Host};
use crate::models::layers::Projection;
use candle_core::{DType, Device};

impl Layer {
    pub(super) fn projections(&mut self) -> Vec<&mut Projection> {
        let feedforward: Vec<&mut Projection> = match &mut self.feedforward {
            Feedforward::Dense(mlp) => mlp.projections().collect(),
            Feedforward::Mixture(moe) => moe.projections().collect(),
        };
        let attention = self.attention.projections();
        attention.into_iter().chain(feedforward).collect()
    }

    fn freeze(&mut self) {
        for norm in [&mut self.input_norm, &mut self.post_norm] {
            *norm = norm.clone().frozen();
        }
        self.attention.freeze();
        if let Feedforward::Mixture(moe) = &mut self.feedforward {
            moe.freeze();
        }
    }
}

impl Host for Llama {
    fn adapters(&self) -> &Adapters {
        &self.adapters
    }

    fn adapters_mut(&mut self) -> &mut Adapters {
        &mut self.adapters
    }

    fn projections(&mut self) -> Vec<&mut Projection> {
        let layers = self.layers.iter_mut().flat_map(Layer::projections);
        layers.chain(self.head.projection()).collect()
    }

    fn freeze(&mut self) {
        self.embedding = self.embedding.clone().frozen();
        self.layers.iter_mut().for_each(Layer::freeze);
        self.norm = self.norm.clone().frozen();
        self.head.freeze();
        for layer in self.projections() {
            layer.freeze();
        }
    }

    fn task(&self) -> &'static str {
        "CAUSAL_LM"
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn device(&self) -> &Device {
        &self.device
    }
}
