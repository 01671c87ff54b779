//! What a model family provides for adapters.

use super::Adapters;
use crate::models::error::Result;
use crate::models::layers::Projection;
use candle_core::{DType, Device};
use fp8_files::adapter::{Naming, SavedLayer};

/// A model that can hold adapters.
pub(crate) trait Host {
    /// What it holds.
    fn adapters(&self) -> &Adapters;

    /// What it holds.
    fn adapters_mut(&mut self) -> &mut Adapters;

    /// The linear layers, in the order of the model.
    fn projections(&mut self) -> Vec<&mut Projection>;

    /// Detaches all parameters, including those of the linear layers, so that they get no gradient.
    fn freeze(&mut self);

    /// Whether [`Host::make_room`] can make this layer, for any classes.
    fn takes(&self, saved: &SavedLayer) -> bool {
        let _ = saved;
        false
    }

    /// Makes the layers that an adapter replaces, where the model could have them but does not; `labels` names their classes.
    fn make_room(&mut self, saved: &[SavedLayer], labels: &[String]) -> Result<()> {
        let _ = (saved, labels);
        Ok(())
    }

    /// PEFT's name for what the model does.
    fn task(&self) -> &'static str;

    /// The dtype of activations.
    fn dtype(&self) -> DType;

    /// The device that it computes on.
    fn device(&self) -> &Device;

    /// How a new adapter names the layers: as the class of transformers for this task does.
    fn naming(&self) -> Naming {
        Naming::Same
    }
}
