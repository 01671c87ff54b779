//! The encoder as the host of adapters.

use super::{Bert, Layer};
use crate::models::adapters::{Adapters, Host};
use crate::models::layers::Projection;
use candle_core::{DType, Device};
use fp8_files::adapter::Naming;

impl Layer {
    fn projections(&mut self) -> [&mut Projection; 6] {
        [
            &mut self.query,
            &mut self.key,
            &mut self.value,
            &mut self.attention_output,
            &mut self.up,
            &mut self.down,
        ]
    }

    fn freeze(&mut self) {
        for norm in [&mut self.attention_norm, &mut self.norm] {
            *norm = norm.clone().frozen();
        }
    }
}

impl Host for Bert {
    fn adapters(&self) -> &Adapters {
        &self.adapters
    }

    fn adapters_mut(&mut self) -> &mut Adapters {
        &mut self.adapters
    }

    fn projections(&mut self) -> Vec<&mut Projection> {
        self.layers
            .iter_mut()
            .flat_map(Layer::projections)
            .collect()
    }

    fn freeze(&mut self) {
        for table in [&mut self.words, &mut self.positions, &mut self.types] {
            *table = table.clone().frozen();
        }
        self.norm = self.norm.clone().frozen();
        self.layers.iter_mut().for_each(Layer::freeze);
        for layer in self.projections() {
            layer.freeze();
        }
    }

    fn task(&self) -> &'static str {
        "FEATURE_EXTRACTION"
    }

    fn dtype(&self) -> DType {
        self.words.embeddings().dtype()
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn naming(&self) -> Naming {
        Naming::Without("bert")
    }
}
