//! Options of an export.

use crate::error::{ExportError, Result};
use crate::load::LoadedNames;
use crate::rewrite::Spelling;
use candle_core::{Tensor, TensorId};
use candle_nn::VarMap;
use fp8_core::setters;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::PoisonError;

/// The names and tensors that the model has shown.
#[derive(Debug, Default)]
pub(super) struct Shown {
    pub(super) names: HashSet<String>,
    pub(super) tensors: HashSet<TensorId>,
}

/// The name of a tensor that the model shows without one.
pub(super) enum Name<'a> {
    /// Its name in the VarMap.
    Variable(&'a str),
    /// The tensor is not in the VarMap, so it is not a parameter.
    Buffer,
    /// Not known, without a VarMap.
    Unknown,
}

/// What an export does with a layer whose input features are not a multiple of its recipe's groups: 128 for `blockwise`, 32 for
/// `mxfp8`. Training pads the last group; a file has only whole groups.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Ragged {
    /// [`FilesError::NotExportable`](crate::FilesError::NotExportable), which names the layer.
    #[default]
    Refuse,
    /// Uses the next coarser scales: one per row of the weight and one per token, as in `rowwise`.
    Rowwise,
    /// The layer is written in high precision.
    HighPrecision,
}

/// Options of [`save_calibrated_with`](crate::save_calibrated_with).
///
/// An export holds what the model shows ([`Fp8Module::visit`](crate::Fp8Module::visit)). A field with `#[fp8(skip)]` is not shown, so
/// its parameters would be missing in the file. If the options list the expected parameters, the export fails and names the missing
/// ones.
///
/// The VarMap of [`ExportOptions::with_vars`] also provides the names of tensors that the model shows without one: bare `Tensor`
/// fields and layers of `candle_nn`. Such tensors that are not in it are buffers (masks, tables of sines) and are not written. Without
/// a VarMap a tensor without a name is an error.
#[derive(Debug, Clone, Default)]
pub struct ExportOptions {
    /// Names that must be in the file, with their tensors if known: a tied tensor counts under any of its names.
    expected: BTreeMap<String, Option<TensorId>>,
    /// The name of each variable of the VarMap, if there is one; the first name of a tied variable.
    names: Option<HashMap<TensorId, String>>,
    pub(super) config: Option<Map<String, Value>>,
    pub(super) spelling: Spelling,
    pub(super) power_of_two_inputs: bool,
    pub(super) ragged: Ragged,
}

impl ExportOptions {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Requires every variable to be in the file, and names tensors that the model shows without a name.
    #[must_use]
    pub fn with_vars(mut self, vars: &VarMap) -> Self {
        let vars = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
        let named = vars
            .iter()
            .map(|(name, var)| (name.clone(), Some(var.as_tensor().id())));
        self.expected.extend(named);
        let names = self.names.get_or_insert_default();
        for (name, var) in vars.iter() {
            let known = names.entry(var.as_tensor().id()).or_insert(name.clone());
            if name < known {
                known.clone_from(name);
            }
        }
        drop(vars);
        self
    }

    /// Requires tensors with these names to be in the file.
    #[must_use]
    pub fn with_names<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        let named = names.into_iter().map(|name| (name.into(), None));
        self.expected.extend(named);
        self
    }

    /// Requires every tensor that the model has loaded from a checkpoint to be in the file.
    #[must_use]
    pub fn with_loaded(self, loaded: &LoadedNames) -> Self {
        self.with_names(loaded.names())
    }

    /// Sets the entries of `config.json` beside `quantization_config`, in place of those of an existing file. The new configuration
    /// becomes visible together with the model.
    #[must_use]
    pub fn with_config(mut self, entries: Map<String, Value>) -> Self {
        self.config = Some(entries);
        self
    }

    /// The name of a tensor in the VarMap.
    pub(super) fn name_of(&self, tensor: &Tensor) -> Name<'_> {
        match &self.names {
            None => Name::Unknown,
            Some(names) => match names.get(&tensor.id()) {
                Some(name) => Name::Variable(name),
                None => Name::Buffer,
            },
        }
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
            false => Err(ExportError::MissedParameters { names: missing }.into()),
        }
    }
}

setters! { ExportOptions:
    /// The family of checkpoints whose names and configuration the file has. Default: compressed-tensors, which can express the
    /// most; others fail with [`FilesError::Inexpressible`](crate::FilesError::Inexpressible) for a layer that they cannot hold.
    ///
    /// ```
    /// # use fp8_recipes as fp8;
    /// use fp8::{ExportOptions, rewrite::Spelling};
    /// let options = ExportOptions::new().with_spelling(Spelling::ModelOpt);
    /// println!("{options:?}"); // for `save_calibrated_with`
    /// ```
    with_spelling(spelling: Spelling);
    /// Whether inputs of the loaded model are scaled by powers of two where the recipe of the calibration does so (`rowwise`,
    /// `rowwise_with_gw_hp`, `blockwise`), so that it computes the bits of the calibrated model. Default no: each input gets the exact
    /// scale that other engines compute from the same file.
    ///
    /// [`Spelling::Fp8Blocks`] writes this into its configuration (`scale_fmt`), which not all engines read. For compressed-tensors it
    /// is an entry in the file's metadata that only this library reads, so other engines compute slightly different logits, equal to
    /// about 23 dB. The other spellings reject such layers.
    with_power_of_two_inputs(power_of_two_inputs: bool);
    /// What to do with layers whose inputs are not a multiple of their recipe's groups. Default: the export fails.
    with_ragged(ragged: Ragged);
}
