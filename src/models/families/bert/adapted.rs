//! The encoder as the host of adapters.

use super::head::{CLASSIFIER, POOLER};
use super::{Bert, Layer};
use crate::models::adapters::{Adapters, Host};
use crate::models::error::Result;
use crate::models::layers::Projection;
use candle_core::{DType, Device};
use fp8_files::adapter::{Naming, SavedLayer};

impl Layer {
    pub(super) fn projections(&mut self) -> [&mut Projection; 6] {
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
        let layers = self.layers.iter_mut().flat_map(Layer::projections);
        let head = self.head.iter_mut().flat_map(|head| head.projections());
        layers.chain(head).collect()
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

    fn takes(&self, saved: &SavedLayer) -> bool {
        let hidden = self.config.hidden_size;
        match saved.path.strip_prefix("bert.").unwrap_or(&saved.path) {
            CLASSIFIER => saved.sizes.1 == hidden,
            POOLER => saved.sizes == (hidden, hidden),
            _ => false,
        }
    }

    fn make_room(&mut self, saved: &[SavedLayer], labels: &[String]) -> Result<()> {
        match saved.iter().find(|layer| layer.path == CLASSIFIER) {
            Some(classifier) => self.make_classes(classifier.sizes.0, labels),
            None => Ok(()),
        }
    }

    fn task(&self) -> &'static str {
        match self.head {
            Some(_) => "SEQ_CLS",
            None => "FEATURE_EXTRACTION",
        }
    }

    fn dtype(&self) -> DType {
        self.words.embeddings().dtype()
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn naming(&self) -> Naming {
        match (&self.head, self.prefix()) {
            (None, _) => Naming::Without("bert"),
            (Some(_), "") => Naming::With("bert"),
            (Some(_), _) => Naming::Same,
        }
    }
}
