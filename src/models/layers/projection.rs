//! A linear layer of a model, and the update of the active adapter.

use crate::nn::{InputScaling, Linear, LoraUpdate, StaticWeight};
use candle_core::{DType, Module, Result, Tensor};
use fp8_recipes::{Fp8Module, Visitor};
use std::fmt;
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

/// A function that sees the inputs of a layer, with its path, before the layer computes.
#[derive(Clone)]
pub(crate) struct Tap(Arc<Show>);

type Show = dyn Fn(&str, &Tensor) -> Result<()> + Send + Sync;

impl Tap {
    pub(crate) fn new(show: impl Fn(&str, &Tensor) -> Result<()> + Send + Sync + 'static) -> Self {
        Self(Arc::new(show))
    }
}

impl fmt::Debug for Tap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tap")
    }
}

/// A linear layer. An adapter may add an update to its results, or replace it; without an adapter it is the layer alone. Rows of
/// results do not depend on each other, so tokens get what they get alone.
#[derive(Debug, Clone)]
pub(crate) struct Projection {
    base: Linear,
    beside: Option<Box<Beside>>,
}

/// What only a few layers have.
#[derive(Debug, Clone, Default)]
struct Beside {
    change: Option<Change>,
    tap: Option<Tap>,
}

/// What the active adapter does to a layer.
#[derive(Debug, Clone)]
pub(crate) enum Change {
    /// It adds an update to the results, with dropout by this seed.
    Update(LoraUpdate, DropoutSeed),
    /// It has this layer in place of it.
    Replace(Linear),
}

impl From<Linear> for Projection {
    fn from(base: Linear) -> Self {
        let base = base.with_independent_rows();
        Self { base, beside: None }
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

    /// Whether the layer has a bias.
    pub(crate) fn has_bias(&self) -> bool {
        self.base.bias().is_some()
    }

    /// The weight, if the layer multiplies by it in high precision and does nothing else.
    pub(crate) fn matrix(&self) -> Option<&Tensor> {
        let beside = self.beside.as_deref();
        let is_alone = beside.is_none_or(|beside| beside.change.is_none() && beside.tap.is_none());
        let is_plain = self.base.bias().is_none() && self.base.fp8_state().is_none();
        self.base.plain_weight().filter(|_| is_alone && is_plain)
    }

    /// The layer that computes.
    fn layer(&self) -> &Linear {
        match self.changed() {
            Some(Change::Replace(layer)) => layer,
            Some(Change::Update(..)) | None => &self.base,
        }
    }

    /// Sets what the active adapter does to the layer.
    pub(crate) fn change(&mut self, change: Option<Change>) {
        let change = change.map(|change| match change {
            Change::Replace(layer) => Change::Replace(layer.with_independent_rows()),
            update => update,
        });
        if change.is_some() || self.beside.is_some() {
            self.beside.get_or_insert_default().change = change;
        }
    }

    fn changed(&self) -> Option<&Change> {
        self.beside.as_ref()?.change.as_ref()
    }

    /// Rounds the operands of the layer's own products in high precision to `dtype`, or leaves them with None.
    pub(crate) fn set_operands(&mut self, dtype: Option<DType>) {
        self.base = self.base.clone().with_operands(dtype);
    }

    /// Replaces the layer for good by another one, in high precision of `dtype`.
    pub(crate) fn set_base(&mut self, layer: &Linear, dtype: DType) -> crate::Result<()> {
        let weight = layer.weight()?.to_dtype(dtype)?;
        let base = Linear::new(weight, layer.bias().cloned()).with_path(self.path());
        let operands = self.base.operands();
        self.base = base.with_independent_rows().with_operands(operands);
        Ok(())
    }

    /// The layer, for a search of its codes: in high precision and without an update.
    pub(crate) fn searchable(&self) -> crate::models::Result<&Linear> {
        let reason = match (self.changed(), self.base.static_weight()) {
            (Some(_), _) => "has an adapter: merge it into the weights first",
            (None, Some(_)) => "holds FP8 codes: open the model in high precision",
            (None, None) => return Ok(&self.base),
        };
        Err(crate::models::Error::NotSearchable {
            path: self.path().to_string(),
            reason,
        })
    }

    /// Replaces the layer's weight by another one in high precision.
    pub(crate) fn set_weight(&mut self, weight: Tensor) {
        self.base = Linear::new(weight, self.base.bias().cloned()).with_path(self.path());
    }

    /// Replaces the layer's weight by codes, and casts its inputs as they do.
    pub(crate) fn set_codes(&mut self, codes: StaticWeight) {
        let bias = self.base.bias().cloned();
        self.base = Linear::from_static(codes, bias, self.path()).with_independent_rows();
    }

    /// Sets the function that sees the layer's inputs.
    pub(crate) fn set_tap(&mut self, tap: Option<Tap>) {
        self.beside.get_or_insert_default().tap = tap;
    }

    fn show(&self, x: &Tensor) -> Result<()> {
        match self.beside.as_ref().and_then(|beside| beside.tap.as_ref()) {
            None => Ok(()),
            Some(Tap(show)) => show(self.path(), x),
        }
    }

    /// Detaches the layer's own parameters, so that they get no gradient.
    pub(crate) fn freeze(&mut self) {
        self.base = self.base.clone().frozen();
    }

    /// Adds an update to the layer's weight, which is in high precision of `dtype` then.
    pub(crate) fn merge(&mut self, update: &LoraUpdate, dtype: DType) -> crate::Result<()> {
        let merged = update.merged(&self.base)?;
        self.set_base(&merged, dtype)
    }

    /// Whether the scale of a row of inputs depends on the other rows.
    pub(crate) fn shares_scales(&self) -> bool {
        let weight = self.layer().static_weight();
        let input = weight.map(StaticWeight::input_scaling);
        matches!(input, Some(InputScaling::DynamicPerTensor { .. }))
    }

    /// The outputs of layers that read the same input, in order.
    pub(crate) fn forward_joint(parts: &[Self], x: &Tensor) -> Result<Vec<Tensor>> {
        parts.iter().try_for_each(|part| part.show(x))?;
        let outputs = Linear::forward_joint(parts.iter().map(Self::layer), x)?;
        let outputs = parts.iter().zip(outputs);
        outputs.map(|(part, y)| part.updated(y, x)).collect()
    }

    /// `y`, the layer's result for `x`, with the update.
    fn updated(&self, y: Tensor, x: &Tensor) -> Result<Tensor> {
        match self.changed() {
            Some(Change::Update(update, seed)) => Ok(update.add_to(&y, x, seed.get())?),
            Some(Change::Replace(_)) | None => Ok(y),
        }
    }
}

impl Module for Projection {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.show(x)?;
        self.updated(self.layer().forward(x)?, x)
    }
}

impl Fp8Module for Projection {
    fn visit(&self, visitor: &mut dyn Visitor) {
        self.layer().visit(visitor);
        if let Some(Change::Update(update, _)) = self.changed() {
            update.visit(visitor);
        }
    }
}
