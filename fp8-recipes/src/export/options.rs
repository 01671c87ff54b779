//! What an export can be held against.

use crate::error::{Error, Result};
use crate::load::LoadedNames;
use candle_core::TensorId;
use candle_nn::VarMap;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashSet};
use std::sync::PoisonError;

/// What the model has shown.
#[derive(Debug, Default)]
pub(super) struct Shown {
    pub(super) names: HashSet<String>,
    pub(super) tensors: HashSet<TensorId>,
}

/// Options of [`save_calibrated_with`](crate::save_calibrated_with): what the model must have in it.
///
/// An export holds what the model shows ([`Fp8Module::visit`](crate::Fp8Module::visit)). A field after `skip` in
/// [`fp8_module!`](crate::fp8_module) is not shown; where it holds parameters, they would be missing in the file
/// without a word. Given the parameters that there are, the export fails and names those that are missing.
///
/// It may also be given the model's configuration, which then comes into sight together with the model.
#[derive(Debug, Clone, Default)]
pub struct ExportOptions {
    /// Names, and tensors where they are known: a tied tensor counts under any of its names.
    expected: BTreeMap<String, Option<TensorId>>,
    pub(super) config: Option<Map<String, Value>>,
}

impl ExportOptions {
    /// No demands.
    pub fn new() -> Self {
        Self::default()
    }

    /// Every variable must be in the file.
    #[must_use]
    pub fn with_vars(mut self, vars: &VarMap) -> Self {
        let vars = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
        let named = vars
            .iter()
            .map(|(name, var)| (name.clone(), Some(var.as_tensor().id())));
        self.expected.extend(named);
        drop(vars);
        self
    }

    /// Tensors of these names must be in the file.
    #[must_use]
    pub fn with_names<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        let named = names.into_iter().map(|name| (name.into(), None));
        self.expected.extend(named);
        self
    }

    /// Everything that the model has taken from a checkpoint must be in the file.
    #[must_use]
    pub fn with_loaded(self, loaded: &LoadedNames) -> Self {
        self.with_names(loaded.names())
    }

    /// These entries stand in `config.json` beside `quantization_config`, in place of those of an earlier file.
    #[must_use]
    pub fn with_config(mut self, entries: Map<String, Value>) -> Self {
        self.config = Some(entries);
        self
    }

    pub(super) fn check(&self, shown: &Shown) -> Result<()> {
        let missing: Vec<String> = self
            .expected
            .iter()
            .filter(|(name, id)| {
                !shown.names.contains(*name) && !id.is_some_and(|id| shown.tensors.contains(&id))
            })
            .map(|(name, _)| name.clone())
            .collect();
        match missing.is_empty() {
            true => Ok(()),
            false => Err(Error::MissedParameters { names: missing }),
        }
    }
}
