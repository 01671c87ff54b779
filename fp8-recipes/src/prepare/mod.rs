//! Giving FP8 state to the layers of a model, and saying what became of each.

mod cast_table;
mod operators;
mod options;
mod report;
mod unmatched;

pub use cast_table::{CAST_TENSORS, CastRow, CastTable};
pub use options::{LayerChoice, PrepareOptions};
pub use report::{LayerReport, Note, Outcome, PrepareReport, Unmatched};

use crate::autocast::{Fp8State, LayerRecipe};
use crate::config::{FilterDecision, SkipReason};
use crate::error::Result;
use crate::module::{Fp8Layer, Fp8Module, LayerKind, Visitor};
use candle_core::{DType, Device, Tensor, TensorId};
use fp8_candle::StateTable;
use fp8_candle::weight_version::WeightVersion;
use fp8_files::names::join;
use std::collections::HashMap;
use std::sync::Arc;
pub(crate) use unmatched::named;

/// Gives FP8 state to every linear layer and convolution that the options take, and where they say so to operators. A weight that something else than a linear layer uses
/// too (a head tied to an embedding) stays in high precision: here, in the export and when served. Layers already prepared keep
/// their state, unless they are skipped this time; what the options say of their recipes counts anew. Layers not prepared stay in
/// high precision inside a guard.
///
/// # Errors
/// If the length of histories is out of range, or a tensor operation fails. Layers that cannot be converted are no error: the
/// report says why, and names patterns that match no layer.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device};
/// use candle_nn::{VarBuilder, VarMap};
/// use fp8::{PrepareOptions, nn, prepare_fp8};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let model = vec![nn::linear(64, 32, vb.pp("up"))?, nn::linear(32, 10, vb.pp("head"))?];
/// let report = prepare_fp8(&model, &PrepareOptions::default().with_off("head")?)?;
/// assert_eq!(report.converted(), 1);
/// println!("{report}"); // a line for each layer
/// # Ok(()) }
/// ```
pub fn prepare_fp8<M: Fp8Module + ?Sized>(
    model: &M,
    options: &PrepareOptions,
) -> Result<PrepareReport> {
    options.check()?;
    let named = named(model, options);
    let mut owners = Owners::default();
    model.visit(&mut owners);
    let mut preparer = Preparer {
        options,
        parameters: owners.parameters.into_values().collect(),
        owners: owners.names,
        tables: owners.tables,
        others: owners.others,
        by_path: HashMap::new(),
        report: PrepareReport::default(),
        error: None,
    };
    model.visit(&mut preparer);
    if let Some(error) = preparer.error {
        return Err(error);
    }
    let mut operators = preparer.for_operators();
    model.visit(&mut operators);
    let mut report = operators.finish()?;
    report.unmatched = named.unmatched;
    report.high_precision_anyway = named.high_precision_anyway.into_iter().collect();
    for unmatched in &report.unmatched {
        tracing::warn!("prepare_fp8: {unmatched}");
    }
    Ok(report)
}

/// Which names each tensor goes by, which are used outside of these layers too, with the first name there, and the tables of
/// layers prepared before.
#[derive(Default)]
struct Owners {
    names: HashMap<TensorId, Vec<String>>,
    others: HashMap<TensorId, Option<String>>,
    tables: Vec<Arc<StateTable>>,
    parameters: HashMap<TensorId, WeightVersion>,
}

impl Owners {
    fn parameter(&mut self, tensor: &Tensor) {
        let of = || WeightVersion::of(tensor);
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
            self.note(&join(path, "weight"), layer.held_weight());
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
        }
        let first = self.others.entry(tensor.id());
        first.or_insert_with(|| path.map(str::to_string));
    }
}

struct Preparer<'a> {
    options: &'a PrepareOptions,
    /// What an optimizer of the model's parameters finds its tables by.
    parameters: Arc<[WeightVersion]>,
    owners: HashMap<TensorId, Vec<String>>,
    /// One for each device.
    tables: Vec<Arc<StateTable>>,
    /// Tensors that something else than a linear layer uses.
    others: HashMap<TensorId, Option<String>>,
    by_path: HashMap<String, (TensorId, Arc<Fp8State>)>,
    report: PrepareReport,
    error: Option<crate::Error>,
}

impl Preparer<'_> {
    /// The table of the model on this device.
    fn table(&mut self, device: &Device) -> Result<Arc<StateTable>> {
        let mut tables = self.tables.iter();
        if let Some(table) = tables.find(|table| table.device().same_device(device)) {
            return Ok(table.clone());
        }
        let table = StateTable::new(device)?;
        self.tables.push(table.clone());
        Ok(table)
    }

    /// Why the layer stays in high precision, if it does.
    fn skipped(&self, layer: &dyn Fp8Layer, path: &str) -> Result<Option<SkipReason>> {
        if let Some((pattern, LayerChoice::Off)) = self.options.choice(path) {
            return Ok(Some(SkipReason::Off {
                pattern: pattern.clone(),
            }));
        }
        let (out_features, in_features) = layer.features();
        let decision = self.options.filter.decide(path, out_features, in_features);
        if let FilterDecision::Skip(reason) = decision {
            return Ok(Some(reason));
        }
        let weight = layer.held_weight();
        if let Some(other) = self.others.get(&weight.id()) {
            let with = other.clone();
            return Ok(Some(SkipReason::Tied { with }));
        }
        if !matches!(weight.dtype(), DType::F32 | DType::BF16 | DType::F16) {
            return Ok(Some(SkipReason::WeightDType(weight.dtype())));
        }
        let same_path = (self.by_path.get(path)).is_some_and(|(other, _)| *other != weight.id());
        if same_path {
            return Ok(Some(SkipReason::SamePath));
        }
        non_finite(weight)
    }

    fn outcome(&mut self, layer: &dyn Fp8Layer) -> Result<Outcome> {
        if layer.static_weight().is_some() {
            return Ok(Outcome::Skipped(SkipReason::AlreadyFp8));
        }
        let Some(path) = layer.path() else {
            return Ok(Outcome::Skipped(SkipReason::NoPath));
        };
        if path.is_empty() {
            return Ok(Outcome::Skipped(SkipReason::AtRoot));
        }
        if let Some(reason) = self.skipped(layer, path)? {
            return Ok(Outcome::Skipped(reason));
        }
        let mut notes = vec![];
        let own = match self.options.choice(path) {
            Some((_, LayerChoice::Recipe(recipe))) => Some(LayerRecipe {
                recipe: (**recipe).clone(),
                config: recipe.resolve()?.into(),
            }),
            _ => None,
        };
        if let Some(own) = &own {
            notes.push(Note::OwnRecipe(own.recipe.clone().into()));
        }
        let weight = layer.held_weight();
        let own_name = join(path, "weight");
        let names = self.owners.get(&weight.id()).into_iter().flatten();
        let others: Vec<_> = names.filter(|name| **name != own_name).cloned().collect();
        if !others.is_empty() {
            notes.push(Note::Tied(others));
        }
        let state = match (self.by_path.get(path), layer.fp8_state()) {
            (Some((_, state)), _) => {
                notes.push(Note::SharedState);
                state.clone()
            }
            (None, Some(state)) => {
                notes.push(Note::PreparedBefore);
                state
            }
            (None, None) => {
                let len = self.options.amax_history_len;
                let table = self.table(weight.device())?;
                Arc::new(Fp8State::new(path.into(), layer.roles(), len, &table)?)
            }
        };
        if self.options.is_output_fused(path) {
            notes.push(Note::OutputFused);
        }
        state.set_output_fused(self.options.is_output_fused(path));
        state.set_own_recipe(own);
        state.hold_parameters(&self.parameters);
        let entry = (weight.id(), state.clone());
        self.by_path.insert(path.to_string(), entry);
        layer.set_fp8_state(Some(state));
        Ok(Outcome::Converted(notes))
    }
}

impl Visitor for Preparer<'_> {
    fn layer(&mut self, layer: &dyn Fp8Layer) {
        if self.error.is_some() {
            return;
        }
        let off = layer.kind() == LayerKind::Convolution && !self.options.convolutions;
        let (out_features, in_features) = layer.features();
        let outcome = match off {
            true => Ok(Outcome::Skipped(SkipReason::ConvolutionsOff)),
            false => self.outcome(layer),
        };
        match outcome {
            Ok(outcome) => {
                if matches!(outcome, Outcome::Skipped(_)) {
                    layer.set_fp8_state(None);
                }
                self.report.layers.push(LayerReport {
                    path: layer.path().map(str::to_string),
                    kind: layer.kind(),
                    out_features,
                    in_features,
                    outcome,
                });
            }
            Err(error) => self.error = Some(error),
        }
    }

    fn candle_layer(&mut self, kind: LayerKind, weight: &Tensor) {
        let out_features = weight.dims().first().copied().unwrap_or(0);
        self.report.layers.push(LayerReport {
            path: None,
            kind,
            out_features,
            in_features: weight.elem_count() / out_features.max(1),
            outcome: Outcome::Skipped(SkipReason::CandleNn),
        });
    }

    fn tensor(&mut self, _: Option<&str>, _: &Tensor) {}
}

/// What is wrong with the values of a weight, if anything.
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
