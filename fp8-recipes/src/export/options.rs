//! What an export can be held against.

use crate::error::{ExportError, Result};
use crate::load::LoadedNames;
use crate::rewrite::Spelling;
use candle_core::{Tensor, TensorId};
use candle_nn::VarMap;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::PoisonError;

/// What the model has shown.
#[derive(Debug, Default)]
pub(super) struct Shown {
    pub(super) names: HashSet<String>,
    pub(super) tensors: HashSet<TensorId>,
}

/// What is known of a tensor that the model shows without a name.
pub(super) enum Name<'a> {
    /// Its name in the VarMap.
    Variable(&'a str),
    /// It is not in the VarMap: no parameter.
    Buffer,
    /// There is no VarMap.
    Unknown,
}

/// What an export does with a layer whose input features cannot be cut into the groups of its recipe: 128 for `blockwise`, 32 for `mxfp8`.
/// A recipe pads the last group while it trains; a file has whole groups only.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Ragged {
    /// [`FilesError::NotExportable`](crate::FilesError::NotExportable), which names the layer.
    #[default]
    Refuse,
    /// The next coarser scales: one per row of the weight and one per token, as `rowwise` has them.
    Rowwise,
    /// The layer is written in high precision.
    HighPrecision,
}

/// Options of [`save_calibrated_with`](crate::save_calibrated_with): what the model must have in it.
///
/// An export holds what the model shows ([`Fp8Module::visit`](crate::Fp8Module::visit)). A field with
/// `#[fp8(skip)]` is not shown; where it holds parameters, they would be missing in the file without a word. Given the parameters that there are, the export fails and names those that are missing.
///
/// The VarMap of [`ExportOptions::with_vars`] also names the tensors whose name the model does not know: bare `Tensor` fields
/// and the layers of `candle_nn`. Those that are not in it are buffers (masks, tables of sines) and are not written. Without a
/// VarMap a tensor without a name is an error.
///
/// It may also be given the model's configuration, which then comes into sight together with the model.
#[derive(Debug, Clone, Default)]
pub struct ExportOptions {
    /// Names, and tensors where they are known: a tied tensor counts under any of its names.
    expected: BTreeMap<String, Option<TensorId>>,
    /// The name of each variable, where there is a VarMap; the first one of a tied variable.
    names: Option<HashMap<TensorId, String>>,
    pub(super) config: Option<Map<String, Value>>,
    pub(super) spelling: Spelling,
    pub(super) power_of_two_inputs: bool,
    pub(super) ragged: Ragged,
}

impl ExportOptions {
    /// No demands.
    pub fn new() -> Self {
        Self::default()
    }

    /// Every variable must be in the file, and tensors without a name take theirs from here.
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

    /// The family of checkpoints whose names and configuration the file has. Default: compressed-tensors, which can say the most; others fail
    /// with [`FilesError::Inexpressible`](crate::FilesError::Inexpressible) for a layer that they cannot hold.
    ///
    /// ```
    /// # use fp8_recipes as fp8;
    /// use fp8::{ExportOptions, rewrite::Spelling};
    /// let options = ExportOptions::new().with_spelling(Spelling::ModelOpt);
    /// println!("{options:?}"); // for `save_calibrated_with`
    /// ```
    #[must_use]
    pub fn with_spelling(mut self, spelling: Spelling) -> Self {
        self.spelling = spelling;
        self
    }

    /// Whether inputs of the loaded model are scaled by powers of two where the recipe of the calibration does so (`rowwise`,
    /// `rowwise_with_gw_hp`, `blockwise`), so that it computes the bits of the calibrated model. Default no: each input gets the exact
    /// scale that other engines make of the same file.
    ///
    /// The configuration of [`Spelling::Fp8Blocks`] says it (`scale_fmt`), which not all engines look at. That of compressed-tensors
    /// cannot: an entry of the file's metadata does, which this library alone reads, so that the file then means one thing here and
    /// another elsewhere; logits of the two agree to 23 dB or so. The other spellings refuse such layers.
    #[must_use]
    pub fn with_power_of_two_inputs(mut self, announce: bool) -> Self {
        self.power_of_two_inputs = announce;
        self
    }

    /// What becomes of layers whose inputs cannot be cut into the groups of their recipe. Default: the export fails.
    #[must_use]
    pub fn with_ragged(mut self, ragged: Ragged) -> Self {
        self.ragged = ragged;
        self
    }

    /// What the VarMap calls a tensor.
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
