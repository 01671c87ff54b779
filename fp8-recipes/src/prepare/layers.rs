//! State for linear layers and convolutions.

use super::options::{LayerChoice, PrepareOptions};
use super::report::{Note, Outcome, PrepareReport};
use super::state::{Request, Shared};
use crate::autocast::Fp8State;
use crate::config::{FilterDecision, Recipe, SkipReason};
use crate::error::Result;
use crate::module::{Fp8Layer, Fp8Module, LayerKind, Visitor, has_same_values};
use crate::timings::{LayerCase, LayerTiming};
use candle_core::{DType, Tensor, TensorId};
use fp8_candle::StateTable;
use fp8_candle::weight_version::WeightVersion;
use fp8_files::names::join;
use fp8_scaled::Parameter;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Gives state to the layers of `model`; returns what operators share with them, and the paths of converted layers.
pub(super) fn prepare_layers<'a, M: Fp8Module + ?Sized>(
    model: &M,
    options: &'a PrepareOptions,
) -> Result<(Shared<'a>, HashSet<String>)> {
    let mut owners = Owners::default();
    model.visit(&mut owners);
    let mut preparer = Preparer {
        shared: Shared {
            options,
            parameters: owners.parameters.into_values().collect(),
            tables: owners.tables,
            report: PrepareReport::default(),
            error: None,
        },
        names: owners.names,
        others: owners.others,
        named: owners.named,
        by_path: HashMap::new(),
    };
    model.visit(&mut preparer);
    match preparer.shared.error.take() {
        Some(error) => Err(error),
        None => Ok((preparer.shared, preparer.by_path.into_keys().collect())),
    }
}

/// Who uses the tensors of a model.
#[derive(Default)]
struct Owners {
    /// All names of a tensor.
    names: HashMap<TensorId, Vec<String>>,
    /// Tensors that are also used outside linear layers and convolutions, with their first name there.
    others: HashMap<TensorId, Option<String>>,
    /// The first of them with each name.
    named: HashMap<String, Tensor>,
    /// The tables of layers that were prepared before.
    tables: Vec<Arc<StateTable>>,
    parameters: HashMap<TensorId, WeightVersion>,
}

impl Owners {
    fn parameter(&mut self, tensor: &Tensor) {
        // Optimizers know the variable, layers may know only its placeholder.
        let of = || WeightVersion::of(Parameter::of(tensor).variable());
        self.parameters.entry(tensor.id()).or_insert_with(of);
    }

    fn note(&mut self, path: &str, tensor: &Tensor) {
        let names = self.names.entry(tensor.id()).or_default();
        if !names.iter().any(|name| name == path) {
            names.push(path.to_string());
        }
    }
}

impl Visitor for Owners {
    fn layer(&mut self, layer: &dyn Fp8Layer) {
        if let Some(path) = layer.path() {
            self.note(&join(path, layer.weight_name()), layer.held_weight());
        }
        self.parameter(layer.held_weight());
        if let Some(bias) = layer.bias() {
            self.parameter(bias);
        }
        if let Some(state) = layer.fp8_state()
            && !(self.tables.iter()).any(|table| Arc::ptr_eq(table, state.table()))
        {
            self.tables.push(state.table().clone());
        }
    }

    fn tensor(&mut self, path: Option<&str>, tensor: &Tensor) {
        self.parameter(tensor);
        if let Some(path) = path {
            self.note(path, tensor);
            let first = self.named.entry(path.to_string());
            first.or_insert_with(|| tensor.clone());
        }
        let first = self.others.entry(tensor.id());
        first.or_insert_with(|| path.map(str::to_string));
    }
}

struct Preparer<'a> {
    shared: Shared<'a>,
    names: HashMap<TensorId, Vec<String>>,
    /// Tensors that are also used outside linear layers and convolutions.
    others: HashMap<TensorId, Option<String>>,
    /// The first of them with each name.
    named: HashMap<String, Tensor>,
    by_path: HashMap<String, (TensorId, Arc<Fp8State>)>,
}

impl Preparer<'_> {
    /// Why the layer stays in high precision, if it does.
    fn skipped(&self, layer: &dyn Fp8Layer, path: &str) -> Result<Option<SkipReason>> {
        let (out_features, in_features) = layer.features();
        let decision = self
            .shared
            .options
            .filter
            .decide(path, out_features, in_features);
        if let FilterDecision::Skip(reason) = decision {
            return Ok(Some(reason));
        }
        let weight = layer.held_weight();
        if let Some(other) = self.others.get(&weight.id()) {
            let with = other.clone();
            return Ok(Some(SkipReason::Tied { with }));
        }
        let own = join(path, layer.weight_name());
        if let Some(other) = self.named.get(&own)
            && is_same(other, weight)?
        {
            let with = Some(own);
            return Ok(Some(SkipReason::Tied { with }));
        }
        if !matches!(weight.dtype(), DType::F32 | DType::BF16 | DType::F16) {
            return Ok(Some(SkipReason::WeightDType(weight.dtype())));
        }
        let same_path = (self.by_path.get(path)).is_some_and(|(other, _)| *other != weight.id());
        if same_path {
            return Ok(Some(SkipReason::SamePath));
        }
        match Parameter::of(weight) {
            // Each rank sees a part of it, and all must decide alike; Inf and NaN in it veto steps.
            Parameter::Sharded(_) => Ok(None),
            _ => non_finite(weight),
        }
    }

    /// The times of the layer; None if the options do not ask for them.
    fn timing(&self, layer: &dyn Fp8Layer, path: &str) -> Result<Option<(LayerCase, LayerTiming)>> {
        let options = self.shared.options;
        let Some(auto) = options
            .auto
            .as_ref()
            .filter(|_| layer.kind() == LayerKind::Linear)
        else {
            return Ok(None);
        };
        let recipe = match options.choice(path) {
            Some((_, LayerChoice::Recipe(own))) => own,
            _ => &auto.recipe,
        };
        let (weight, computation) = (layer.held_weight(), (auto.computation)(recipe.clone()));
        let case = LayerCase::new(computation, layer.features(), auto.tokens);
        let case = case.with_dtype(weight.dtype());
        let timing = options.timings.get(&case, weight.device())?;
        Ok(Some((case, timing)))
    }

    fn outcome(&mut self, layer: &dyn Fp8Layer) -> Result<Outcome> {
        if layer.static_weight().is_some() {
            return Ok(Outcome::Skipped(SkipReason::AlreadyFp8));
        }
        let path = match self.shared.path(layer.path()) {
            Ok(path) => path,
            Err(reason) => return Ok(Outcome::Skipped(reason)),
        };
        if let Some(reason) = self.skipped(layer, path)? {
            return Ok(Outcome::Skipped(reason));
        }
        if self.shared.options.auto.is_some() && layer.kind() == LayerKind::BatchedLinear {
            return Ok(Outcome::Skipped(SkipReason::NotTimed));
        }
        let faster = match self.timing(layer, path)? {
            Some((case, timing)) if !timing.fp8_pays => {
                let recipe = case.computation.recipe();
                return Ok(Outcome::Skipped(SkipReason::NotFaster {
                    recipe: recipe.map_or(String::new(), Recipe::to_string),
                    tokens: case.tokens,
                    fp8: timing.fp8,
                    high_precision: timing.high_precision,
                }));
            }
            timed => timed.map(|(_, timing)| Note::Faster(timing)),
        };
        let weight = layer.held_weight();
        let own_name = join(path, layer.weight_name());
        let names = self.names.get(&weight.id()).into_iter().flatten();
        let (state, mut notes) = self.shared.state(Request {
            path,
            shared: self.by_path.get(path).map(|(_, state)| state.clone()),
            before: layer.fp8_state(),
            roles: layer.roles(),
            amax_history_len: self.shared.options.amax_history_len,
            shards: layer.shards(),
            device: Some(weight.device()),
            tied: names.filter(|name| **name != own_name).cloned().collect(),
        })?;
        notes.extend(faster);
        let entry = (weight.id(), state.clone());
        self.by_path.insert(path.to_string(), entry);
        layer.set_fp8_state(Some(state));
        Ok(Outcome::Converted(notes))
    }
}

impl Visitor for Preparer<'_> {
    fn layer(&mut self, layer: &dyn Fp8Layer) {
        if self.shared.error.is_some() {
            return;
        }
        let off = layer.kind() == LayerKind::Convolution && !self.shared.options.convolutions;
        let outcome = match off {
            true => Ok(Outcome::Skipped(SkipReason::ConvolutionsOff)),
            false => self.outcome(layer),
        };
        let clear = || layer.set_fp8_state(None);
        let (path, kind) = (layer.path(), layer.kind());
        self.shared
            .record(path, kind, layer.features(), outcome, clear);
    }

    fn candle_layer(&mut self, kind: LayerKind, weight: &Tensor) {
        let out_features = weight.dims().first().copied().unwrap_or(0);
        let in_features = weight.elem_count() / out_features.max(1);
        let outcome = Ok(Outcome::Skipped(SkipReason::CandleNn));
        let features = (out_features, in_features);
        self.shared.record(None, kind, features, outcome, || ());
    }
}

/// Whether both are one tensor of a file that was read twice, as an embedding and a head of one name are. An export stores it once, in
/// high precision.
fn is_same(other: &Tensor, weight: &Tensor) -> Result<bool> {
    let is_sharded = |tensor: &Tensor| Parameter::of(tensor).sharded().is_some();
    match is_sharded(other) || is_sharded(weight) {
        // Values would have to be gathered by all ranks together; the name and the sizes must do.
        true => Ok(other.dims() == weight.dims()),
        false => has_same_values(other, weight),
    }
}

/// A reason to skip a weight with values that are not finite.
fn non_finite(weight: &Tensor) -> Result<Option<SkipReason>> {
    let values = weight
        .to_dtype(DType::F32)?
        .flatten_all()?
        .to_vec1::<f32>()?;
    let nan = values.iter().filter(|value| value.is_nan()).count();
    let inf = values.iter().filter(|value| value.is_infinite()).count();
    let of = values.len();
    Ok((nan + inf > 0).then_some(SkipReason::NonFinite { nan, inf, of }))
}
