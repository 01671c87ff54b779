//! What the loader needs to know about a family of checkpoints.

use super::family_name::FamilyName;
use crate::error::{Error, Result};
use crate::scheme::InputScheme;
use fp8_core::Granularity;
use std::fmt;
use std::path::{Path, PathBuf};

/// The order of a tensor's rows in the file, compared with the tensor that models ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// The same order.
    AsStored,
    /// The two halves of each head's rotation alternate in the file and follow each other in the model.
    Rotary {
        /// Heads that share the rows.
        heads: usize,
    },
}

/// The order of the elements of a scale tensor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum ScaleLayout {
    /// Row after row.
    #[default]
    RowMajor,
    /// In tiles of 128x4, as cuBLAS reads them.
    Tiles,
}

/// What a configuration declares about the scheme of a layer. The tensors decide the rest (`pair.rs`).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Declared {
    /// None where the shape of the scales decides.
    pub(super) weight: Option<Granularity>,
    /// None where the presence of an `input_scale` decides.
    pub(super) input: Option<InputScheme>,
    pub(super) layout: ScaleLayout,
}

impl Declared {
    pub(super) fn new(
        weight: impl Into<Option<Granularity>>,
        input: impl Into<Option<InputScheme>>,
    ) -> Self {
        Self {
            weight: weight.into(),
            input: input.into(),
            layout: ScaleLayout::RowMajor,
        }
    }
}

type Layer = dyn Fn(&str) -> Result<Option<Declared>> + Send + Sync;
type Rename = dyn Fn(&str) -> (String, Order) + Send + Sync;

/// A family of checkpoints: its names, and what its configuration declares about layers. Each file of the folder `families` makes one.
/// The checks are in the catalogue, the same for all families.
pub(super) struct Family {
    pub(super) name: FamilyName,
    /// The configuration; None if there is none.
    pub(super) source: Option<PathBuf>,
    /// The family's names for `weight_scale`. Messages use the first.
    pub(super) weight_scales: &'static [&'static str],
    /// The family's names for `input_scale`. Messages use the first.
    pub(super) input_scales: &'static [&'static str],
    /// Names of tensors that describe other tensors and have no value of their own.
    pub(super) descriptions: &'static [&'static str],
    /// Whether U32 weights are words of four codes.
    pub(super) packs_words: bool,
    /// Whether FP8 tensors need no scales.
    pub(super) is_unscaled: bool,
    /// Whether the file may have input scales that nothing uses.
    pub(super) may_ignore_input_scales: bool,
    /// What is declared for the layer at a path; None if the configuration leaves it in high precision.
    pub(super) layer: Box<Layer>,
    /// The canonical name of a stored name, and the order of the tensor's rows.
    pub(super) rename: Box<Rename>,
}

impl Family {
    /// A family with the usual names.
    pub(super) fn new(
        name: FamilyName,
        source: Option<&Path>,
        layer: impl Fn(&str) -> Result<Option<Declared>> + Send + Sync + 'static,
    ) -> Self {
        Self {
            name,
            source: source.map(Path::to_path_buf),
            weight_scales: &["weight_scale"],
            input_scales: &["input_scale"],
            descriptions: &[],
            packs_words: false,
            is_unscaled: false,
            may_ignore_input_scales: false,
            layer: Box::new(layer),
            rename: Box::new(|name| (name.to_string(), Order::AsStored)),
        }
    }
}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Family({}, {:?})", self.name, self.source)
    }
}

/// What several entries of the configuration at `source` declare for the layer at `path`; None if there is no entry.
///
/// # Errors
/// [`Error::Ambiguous`] if they differ. Engines take the first one of the file, but a JSON map does not keep its order here.
pub(super) fn agreed<'a, D: Copy + PartialEq + 'a>(
    source: &Path,
    path: &str,
    mut entries: impl Iterator<Item = &'a (String, D)>,
) -> Result<Option<D>> {
    let Some((first, declared)) = entries.next() else {
        return Ok(None);
    };
    match entries.find(|(_, other)| other != declared) {
        None => Ok(Some(*declared)),
        Some((second, _)) => Err(Error::Ambiguous {
            path: source.to_path_buf(),
            tensor: path.to_string(),
            first: first.clone(),
            second: second.clone(),
        }),
    }
}
