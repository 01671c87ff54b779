//! What a model family shows of itself to adapters.

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

    /// Takes the gradient from all parameters, those of the linear layers included.
    fn freeze(&mut self);

    /// Whether [`Host::make_room`] makes a layer for this one, of whatever classes.
    fn takes(&self, saved: &SavedLayer) -> bool {
        let _ = saved;
        false
    }

    /// Makes the layers that an adapter replaces, where the model could have them and does not; `labels` name their classes.
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

    /// How a new adapter names the layers: as the class of transformers for the task does.
    fn naming(&self) -> Naming {
        Naming::Same
    }
}
