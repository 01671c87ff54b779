//! A linear layer of a model, and the update of the active adapter.

use crate::nn::{Linear, LoraUpdate};
use candle_core::{DType, Module, Result, Tensor};
use fp8_recipes::{Fp8Module, Visitor};
use std::sync::{Arc, PoisonError, RwLock};

/// The seed of dropout in all updates of a model; None outside training. Shared, so that it changes between steps while the model is
/// borrowed.
#[derive(Debug, Clone, Default)]
pub(crate) struct DropoutSeed(Arc<RwLock<Option<u64>>>);

impl DropoutSeed {
    pub(crate) fn set(&self, seed: Option<u64>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = seed;
    }

    fn get(&self) -> Option<u64> {
        *self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A linear layer, to whose results an adapter may add an update. Without one it is the layer.
#[derive(Debug, Clone)]
pub(crate) struct Projection {
    base: Linear,
    update: Option<Box<Active>>,
}

#[derive(Debug, Clone)]
struct Active {
    update: LoraUpdate,
    seed: DropoutSeed,
}

impl From<Linear> for Projection {
    fn from(base: Linear) -> Self {
        Self { base, update: None }
    }
}

impl Projection {
    /// The layer's path in the checkpoint.
    pub(crate) fn path(&self) -> &str {
        self.base.path().unwrap_or_default()
    }

    /// (out_features, in_features).
    pub(crate) fn features(&self) -> (usize, usize) {
        self.base.features()
    }

    /// Sets what is added to the layer's results.
    pub(crate) fn set_update(&mut self, update: Option<(LoraUpdate, DropoutSeed)>) {
        self.update = update.map(|(update, seed)| Box::new(Active { update, seed }));
    }

    /// Takes the gradient from the layer's own parameters.
    pub(crate) fn freeze(&mut self) {
        self.base = self.base.clone().frozen();
    }

    /// Adds an update to the layer's weight, which is in high precision of `dtype` then.
    pub(crate) fn merge(&mut self, update: &LoraUpdate, dtype: DType) -> crate::Result<()> {
        let merged = update.merged(&self.base)?;
        let bias = merged.bias().cloned();
        self.base = Linear::new(merged.weight()?.to_dtype(dtype)?, bias).with_path(self.path());
        Ok(())
    }

    /// The outputs of layers that read the same input, in order.
    pub(crate) fn forward_joint(parts: &[Self], x: &Tensor) -> Result<Vec<Tensor>> {
        let outputs = Linear::forward_joint(parts.iter().map(|part| &part.base), x)?;
        let outputs = parts.iter().zip(outputs);
        outputs.map(|(part, y)| part.updated(y, x)).collect()
    }

    /// `y`, the layer's result for `x`, with the update.
    fn updated(&self, y: Tensor, x: &Tensor) -> Result<Tensor> {
        match &self.update {
            None => Ok(y),
            Some(active) => Ok(active.update.add_to(&y, x, active.seed.get())?),
        }
    }
}

impl Module for Projection {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.updated(self.base.forward(x)?, x)
    }
}

impl Fp8Module for Projection {
    fn visit(&self, visitor: &mut dyn Visitor) {
        self.base.visit(visitor);
        if let Some(active) = &self.update {
            active.update.visit(visitor);
        }
    }
}
