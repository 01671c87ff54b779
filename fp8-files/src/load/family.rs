//! What the loader needs to know about a family of checkpoints.

use super::family_name::FamilyName;
use crate::error::{Error, Result};
use crate::scheme::InputScheme;
use fp8_core::Granularity;
use safetensors::Dtype;
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

/// How the number that all scales of an NVFP4 weight have in common acts on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Global {
    /// It multiplies each of them.
    Multiplies,
    /// It divides each of them.
    Divides,
}

/// Elements of a weight that share a scale in NVFP4.
const NVFP4_GROUP: Granularity = Granularity::Blockwise { rows: 1, cols: 16 };

/// What a configuration declares about the scheme of a layer. The tensors decide the rest (`pair.rs`).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Declared {
    /// None where the shape of the scales decides.
    pub(super) weight: Option<Granularity>,
    /// None where the presence of an `input_scale` decides.
    pub(super) input: Option<InputScheme>,
    pub(super) layout: ScaleLayout,
    /// Whether codes are E2M1, two in a byte.
    pub(super) fp4: bool,
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
            fp4: false,
        }
    }

    /// E2M1 codes, a power of two for every 32 of them.
    pub(super) fn mxfp4(input: InputScheme) -> Self {
        Self {
            fp4: true,
            ..Self::new(Granularity::Mx, input)
        }
    }

    /// E2M1 codes, an E4M3 scale for every 16 of them, and one number for all of these scales.
    pub(super) fn nvfp4(input: InputScheme) -> Self {
        Self {
            fp4: true,
            ..Self::new(NVFP4_GROUP, input)
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
    /// The family's names for weights of two E2M1 codes in a byte. None where it has none.
    pub(super) packed_weights: &'static [&'static str],
    /// The family's names for the number that all scales of an NVFP4 weight have in common.
    pub(super) global_scales: &'static [(&'static str, Global)],
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
            packed_weights: &[],
            global_scales: &[],
            packs_words: false,
            is_unscaled: false,
            may_ignore_input_scales: false,
            layer: Box::new(layer),
            rename: Box::new(|name| (name.to_string(), Order::AsStored)),
        }
    }
}

impl Family {
    /// Whether tensors of that name and dtype are weights of E2M1 codes.
    pub(super) fn packs(&self, own: &str, dtype: Dtype) -> bool {
        matches!(dtype, Dtype::U8 | Dtype::I8) && self.packed_weights.contains(&own)
    }

    /// What a tensor of that name does to the scales of a weight; None if it is no global scale.
    pub(super) fn global(&self, own: &str) -> Option<Global> {
        let mut names = self.global_scales.iter();
        names.find_map(|(name, global)| (*name == own).then_some(*global))
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
