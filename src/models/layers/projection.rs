//! A linear layer of a model, and the update of the active adapter.

use super::few_rows::is_few;
use crate::is_guard_open;
use crate::nn::{InputScaling, Linear, LoraUpdate, StaticWeight};
use candle_core::{D, DType, Module, Result, Tensor};
use fp8_candle::ops::few_rows_linear;
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

/// A function that is shown the inputs of a layer, with its path, before it computes.
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

/// A linear layer, to whose results an adapter may add an update, or that an adapter replaces. Without one it is the layer.
#[derive(Debug, Clone)]
pub(crate) struct Projection {
    base: Linear,
    beside: Option<Box<Beside>>,
}

/// What few layers have.
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

    /// The layer that computes.
    fn layer(&self) -> &Linear {
        match self.changed() {
            Some(Change::Replace(layer)) => layer,
            Some(Change::Update(..)) | None => &self.base,
        }
    }

    /// Sets what the active adapter does to the layer.
    pub(crate) fn change(&mut self, change: Option<Change>) {
        if change.is_some() || self.beside.is_some() {
            self.beside.get_or_insert_default().change = change;
        }
    }

    fn changed(&self) -> Option<&Change> {
        self.beside.as_ref()?.change.as_ref()
    }

    /// Another layer for good, in high precision of `dtype`.
    pub(crate) fn set_base(&mut self, layer: &Linear, dtype: DType) -> crate::Result<()> {
        let weight = layer.weight()?.to_dtype(dtype)?;
        self.base = Linear::new(weight, layer.bias().cloned()).with_path(self.path());
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
        self.base = Linear::from_static(codes, bias, self.path());
    }

    /// Sets what is shown the layer's inputs.
    pub(crate) fn set_tap(&mut self, tap: Option<Tap>) {
        self.beside.get_or_insert_default().tap = tap;
    }

    fn show(&self, x: &Tensor) -> Result<()> {
        match self.beside.as_ref().and_then(|beside| beside.tap.as_ref()) {
            None => Ok(()),
            Some(Tap(show)) => show(self.path(), x),
        }
    }

    /// Takes the gradient from the layer's own parameters.
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
        let few = parts.iter().map(|part| part.few_rows(x));
        let few = few.collect::<Result<Vec<_>>>()?;
        let outputs = match few.iter().any(Option::is_some) {
            true => {
                let each = parts.iter().zip(few);
                let each = each.map(|(part, y)| y.map_or_else(|| part.layer().forward(x), Ok));
                each.collect::<Result<Vec<_>>>()?
            }
            false => Linear::forward_joint(parts.iter().map(Self::layer), x)?,
        };
        let outputs = parts.iter().zip(outputs);
        outputs.map(|(part, y)| part.updated(y, x)).collect()
    }

    /// The result for a few rows of inference, if the weight is multiplied in high precision: each row is summed as it is alone.
    fn few_rows(&self, x: &Tensor) -> Result<Option<Tensor>> {
        let layer = self.layer();
        // What does not fit gets the layer's own error.
        let fits = x
            .dim(D::Minus1)
            .is_ok_and(|features| features == layer.features().1);
        if is_guard_open() || !fits || !is_few(x) {
            return Ok(None);
        }
        let weight = match (layer.static_weight(), layer.plain_weight()) {
            (Some(codes), _) if matches!(codes.input_scaling(), InputScaling::None) => {
                codes.weight().dequantize(x.dtype())?
            }
            (None, Some(weight)) if !weight.track_op() => weight.clone(),
            _ => return Ok(None),
        };
        let y = few_rows_linear(x, &weight)?;
        Ok(Some(match layer.bias() {
            Some(bias) => y.broadcast_add(&bias.to_dtype(y.dtype())?)?,
            None => y,
        }))
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
        let y = match self.few_rows(x)? {
            Some(y) => y,
            None => self.layer().forward(x)?,
        };
        self.updated(y, x)
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
