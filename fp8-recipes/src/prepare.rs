//! Giving FP8 state to the layers of a model, and saying what became of each.

use crate::config::{FilterDecision, LayerFilter, check_history_len};
use crate::error::Result;
use crate::module::{Fp8Layer, Fp8Module, Visitor};
use crate::nn::join;
use crate::state::Fp8State;
use candle_core::{DType, Device, Tensor, TensorId};
use fp8_candle::StateTable;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// What [`prepare_fp8`] converts.
#[derive(Debug, Clone)]
pub struct PrepareOptions {
    /// Which layers to take; the default takes all.
    pub filter: LayerFilter,
    /// Length of fresh amax histories; a delayed recipe of another length adapts them, keeping the newest entries.
    pub amax_history_len: usize,
}

impl Default for PrepareOptions {
    fn default() -> Self {
        Self {
            filter: LayerFilter::default(),
            amax_history_len: 1024,
        }
    }
}

impl PrepareOptions {
    /// Sets the filter.
    pub fn with_filter(mut self, filter: LayerFilter) -> Self {
        self.filter = filter;
        self
    }
}

impl From<LayerFilter> for PrepareOptions {
    fn from(filter: LayerFilter) -> Self {
        Self::default().with_filter(filter)
    }
}

/// What became of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It has FP8 state; the text says what is special about it, if anything.
    Converted(Option<String>),
    /// It stays in high precision, and why.
    Skipped(String),
}

/// One linear layer of the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerReport {
    /// Path in the checkpoint.
    pub path: String,
    /// Rows of the weight.
    pub out_features: usize,
    /// Columns of the weight.
    pub in_features: usize,
    /// What became of it.
    pub outcome: Outcome,
}

/// Every linear layer of a model, in the order of its fields. Prints as a table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PrepareReport {
    /// The layers.
    pub layers: Vec<LayerReport>,
}

impl PrepareReport {
    /// Number of layers with FP8 state.
    pub fn converted(&self) -> usize {
        self.layers
            .iter()
            .filter(|l| matches!(l.outcome, Outcome::Converted(_)))
            .count()
    }

    /// Number of layers left in high precision.
    pub fn skipped(&self) -> usize {
        self.layers.len() - self.converted()
    }

    /// The entry of a path.
    pub fn get(&self, path: &str) -> Option<&LayerReport> {
        self.layers.iter().find(|layer| layer.path == path)
    }
}

impl fmt::Display for PrepareReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self
            .layers
            .iter()
            .map(|l| l.path.len())
            .max()
            .unwrap_or(0)
            .max("layer".len());
        writeln!(f, "{:width$}  {:>13}  result", "layer", "[out, in]")?;
        for layer in &self.layers {
            let shape = format!("[{}, {}]", layer.out_features, layer.in_features);
            write!(f, "{:width$}  {shape:>13}  ", layer.path)?;
            match &layer.outcome {
                Outcome::Converted(None) => writeln!(f, "fp8")?,
                Outcome::Converted(Some(note)) => writeln!(f, "fp8 ({note})")?,
                Outcome::Skipped(reason) => writeln!(f, "high precision: {reason}")?,
            }
        }
        write!(
            f,
            "{} converted, {} left in high precision",
            self.converted(),
            self.skipped()
        )
    }
}

/// Gives FP8 state to every linear layer that the filter takes. A weight that something else than a linear layer uses
/// too (a head tied to an embedding) stays in high precision, here, in the export and served. Layers already prepared keep their state, unless
/// they are skipped this time; layers not prepared stay in high precision inside a guard.
///
/// # Errors
/// If the length of histories is out of range, or a tensor operation fails. Layers that cannot be converted are no error: the report says why.
pub fn prepare_fp8<M: Fp8Module + ?Sized>(
    model: &M,
    options: &PrepareOptions,
) -> Result<PrepareReport> {
    check_history_len(options.amax_history_len)?;
    let mut owners = Owners::default();
    model.visit(&mut owners);
    let mut preparer = Preparer {
        options,
        owners: owners.names,
        tables: owners.tables,
        others: owners.others,
        by_path: HashMap::new(),
        report: PrepareReport::default(),
        error: None,
    };
    model.visit(&mut preparer);
    match preparer.error {
        Some(error) => Err(error.into()),
        None => Ok(preparer.report),
    }
}

/// Which names each tensor goes by, which are used outside of these layers too, with the first name there, and the tables of
/// layers prepared before.
#[derive(Default)]
struct Owners {
    names: HashMap<TensorId, Vec<String>>,
    others: HashMap<TensorId, Option<String>>,
    tables: Vec<Arc<StateTable>>,
}

impl Owners {
    fn note(&mut self, path: Option<&str>, tensor: &Tensor) {
        let Some(path) = path else { return };
        let names = self.names.entry(tensor.id()).or_default();
        if !names.iter().any(|name| name == path) {
            names.push(path.to_string());
        }
    }
}

impl Visitor for Owners {
    fn layer(&mut self, layer: &dyn Fp8Layer) {
        let name = layer.path().map(|path| join(path, "weight"));
        self.note(name.as_deref(), layer.held_weight());
        if let Some(state) = layer.fp8_state()
            && !(self.tables.iter()).any(|table| Arc::ptr_eq(table, state.table()))
        {
            self.tables.push(state.table().clone());
        }
    }

    fn tensor(&mut self, path: Option<&str>, tensor: &Tensor) {
        self.note(path, tensor);
        let first = self.others.entry(tensor.id()).or_default();
        *first = first.take().or(path.map(str::to_string));
    }
}

struct Preparer<'a> {
    options: &'a PrepareOptions,
    owners: HashMap<TensorId, Vec<String>>,
    /// One for each device.
    tables: Vec<Arc<StateTable>>,
    /// Tensors that something else than a linear layer uses, with a name there.
    others: HashMap<TensorId, Option<String>>,
    by_path: HashMap<String, (TensorId, Arc<Fp8State>)>,
    report: PrepareReport,
    error: Option<candle_core::Error>,
}

impl Preparer<'_> {
    /// The table of the model on this device.
    fn table(&mut self, device: &Device) -> candle_core::Result<Arc<StateTable>> {
        let mut tables = self.tables.iter();
        if let Some(table) = tables.find(|table| table.device().same_device(device)) {
            return Ok(table.clone());
        }
        let table = StateTable::new(device)?;
        self.tables.push(table.clone());
        Ok(table)
    }

    fn outcome(&mut self, linear: &dyn Fp8Layer) -> candle_core::Result<Outcome> {
        let (out_features, in_features) = linear.features();
        if linear.static_weight().is_some() {
            return Ok(Outcome::Skipped(
                "the weight is FP8 already (static inference)".into(),
            ));
        }
        let path = match linear.path() {
            Some("") => Err("it is at the root of the checkpoint: build it from `vb.pp(..)`"),
            Some(path) => Ok(path),
            None => Err("it has no path: build it from a VarBuilder or call with_path"),
        };
        let path = match path {
            Ok(path) => path,
            Err(reason) => return Ok(Outcome::Skipped(reason.into())),
        };
        let decision = self.options.filter.decide(path, out_features, in_features);
        if let FilterDecision::Skip(reason) = decision {
            return Ok(Outcome::Skipped(reason));
        }
        let weight = linear.held_weight();
        if let Some(other) = self.others.get(&weight.id()) {
            let other = match other {
                Some(name) => format!("`{name}`"),
                None => "a tensor without a name".to_string(),
            };
            return Ok(Outcome::Skipped(format!(
                "its weight is {other} too, which stays in high precision"
            )));
        }
        if !matches!(weight.dtype(), DType::F32 | DType::BF16 | DType::F16) {
            let dtype = weight.dtype().as_str();
            return Ok(Outcome::Skipped(format!(
                "the weight is {dtype}, not f32, bf16 or f16"
            )));
        }
        if let Some(reason) = non_finite(weight)? {
            return Ok(Outcome::Skipped(reason));
        }
        let id = weight.id();
        let mut notes: Vec<String> = vec![];
        let own_name = join(path, "weight");
        if let Some(names) = self.owners.get(&id) {
            let others: Vec<_> = names
                .iter()
                .filter(|name| **name != own_name)
                .map(String::as_str)
                .collect();
            if !others.is_empty() {
                notes.push(format!("weight tied with {}", others.join(", ")));
            }
        }
        let state = match (self.by_path.get(path), linear.fp8_state()) {
            (Some((other, _)), _) if *other != id => {
                return Ok(Outcome::Skipped("another layer has the same path".into()));
            }
            (Some((_, state)), _) => {
                notes.push("shares its state with the same layer used before".into());
                state.clone()
            }
            (None, Some(state)) => {
                notes.push("was prepared before".into());
                state.clone()
            }
            (None, None) => {
                let len = self.options.amax_history_len;
                let table = self.table(weight.device())?;
                Arc::new(Fp8State::new(path.into(), linear.roles(), len, &table)?)
            }
        };
        self.by_path.insert(path.to_string(), (id, state.clone()));
        linear.set_fp8_state(Some(state));
        Ok(Outcome::Converted(
            (!notes.is_empty()).then(|| notes.join("; ")),
        ))
    }
}

impl Visitor for Preparer<'_> {
    fn layer(&mut self, linear: &dyn Fp8Layer) {
        let (out_features, in_features) = linear.features();
        match self.outcome(linear) {
            Ok(outcome) => {
                if matches!(outcome, Outcome::Skipped(_)) {
                    linear.set_fp8_state(None);
                }
                self.report.layers.push(LayerReport {
                    path: linear.path().unwrap_or_default().to_string(),
                    out_features,
                    in_features,
                    outcome,
                });
            }
            Err(error) => self.error = self.error.take().or(Some(error)),
        }
    }

    fn tensor(&mut self, _: Option<&str>, _: &Tensor) {}
}

/// What is wrong with the values of a weight, if anything.
fn non_finite(weight: &Tensor) -> candle_core::Result<Option<String>> {
    let values = weight
        .to_dtype(DType::F32)?
        .flatten_all()?
        .to_vec1::<f32>()?;
    let nans = values.iter().filter(|value| value.is_nan()).count();
    let infs = values.iter().filter(|value| value.is_infinite()).count();
    Ok((nans + infs > 0).then(|| {
        format!(
            "the weight holds {nans} NaN and {infs} Inf of {} values",
            values.len()
        )
    }))
}
