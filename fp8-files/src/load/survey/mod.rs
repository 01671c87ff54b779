//! Everything that can be known about a model's files even if parts of them are faulty.
//!
//! A [`Checkpoint`](super::Checkpoint) is refused at its first fault. Here the same code sorts and compares the tensors, but collects all
//! errors and keeps what is sound.

mod differences;
mod lists;
mod numbers;

pub(crate) use differences::Difference;
pub(crate) use lists::{Kind, Listed};
pub(crate) use numbers::numbers;

use super::catalogue::{Catalogue, Value as Found, Weight};
use super::families::{INPUT_SCALES, WEIGHT_SCALES};
use super::family::{Family, ScaleLayout};
use super::files::{Files, Stored};
use super::{FamilyName, OpenOptions, config, experts, families, refuse};
use crate::error::{Error, Result};
use crate::names::{join, split, weight_name};
use crate::safetensors_file::SafetensorsFile;
use crate::scheme::{InputScheme, granularity_by_shape, grid, has_shape};
use fp8_core::{Granularity, ScaleGrid};
use safetensors::Dtype;
use serde_json::Value;
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// A model's files, sorted as far as they are sound.
pub(crate) struct Survey {
    files: Files,
    catalogue: Catalogue,
    /// The loader's errors, each with the stored name of the tensor that causes it; the name is empty for the configuration.
    pub(crate) refused: Vec<(Error, String)>,
    /// `config.json`, if there is one that parses.
    pub(crate) config: Option<Value>,
    /// Whether the configuration was understood, or there is none.
    pub(crate) is_configured: bool,
    /// Entries of the lists in the configuration that name layers.
    pub(crate) lists: Vec<Listed>,
    /// Where ModelOpt's two files contradict each other.
    pub(crate) differences: Vec<Difference>,
}

/// A stored tensor.
#[derive(Clone, Copy)]
pub(crate) struct Tensor<'a> {
    file: &'a SafetensorsFile,
    /// Its name in the file.
    pub(crate) name: &'a str,
}

impl<'a> Tensor<'a> {
    pub(crate) fn dtype(&self) -> Option<Dtype> {
        self.file.dtype(self.name)
    }

    pub(crate) fn shape(&self) -> &'a [usize] {
        self.file.shape(self.name).unwrap_or_default()
    }

    pub(crate) fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// Some of its bytes; fewer where it ends before.
    pub(crate) fn bytes(&self, bytes: Range<usize>) -> Result<Vec<u8>> {
        self.file.bytes_in(self.name, bytes)
    }
}

/// An FP8 weight that has passed the loader's checks.
#[derive(Clone, Copy)]
pub(crate) struct Layer<'a> {
    /// Canonical path; of a table, the canonical name of the tensor.
    pub(crate) path: &'a str,
    pub(crate) codes: Tensor<'a>,
    /// `[N, K]`.
    pub(crate) shape: [usize; 2],
    pub(crate) granularity: Granularity,
    pub(crate) inputs: InputScheme,
    pub(crate) scale: Option<Tensor<'a>>,
    pub(crate) input_scale: Option<Tensor<'a>>,
    /// Whether the scales are stored in tiles, not row after row.
    pub(crate) is_tiled: bool,
}

impl Layer<'_> {
    /// Which element has which scale.
    pub(crate) fn grid(&self) -> ScaleGrid {
        let [n, k] = self.shape;
        grid(self.granularity, n, k)
    }

    /// The last part of its path, which layers of one kind share.
    pub(crate) fn role(&self) -> &str {
        split(self.path).1
    }
}

impl Survey {
    /// Sorts the tensors of `files`, which are the model whose configuration is in `directory`. `index` has the file of every tensor.
    pub(crate) fn of(
        mut files: Vec<SafetensorsFile>,
        index: HashMap<String, usize>,
        directory: &Path,
        options: &OpenOptions,
    ) -> Self {
        let mut refused = vec![];
        let mut keep = |error: Error| refused.push((error, String::new()));
        files
            .iter()
            .filter_map(|file| refuse::file(file).err())
            .for_each(&mut keep);
        let model = config::read(directory).unwrap_or_else(|error| {
            keep(error);
            None
        });
        let mut all: Vec<&mut SafetensorsFile> = files.iter_mut().collect();
        let stored: Vec<String> = all.iter().flat_map(|file| file.names()).collect();
        if let Err(error) = experts::cut(&mut all, model.as_ref()) {
            keep(error);
        }
        let borrowed: Vec<&SafetensorsFile> = files.iter().collect();
        let read = config::family(directory, model.as_ref(), &borrowed, options);
        let is_configured = read.is_ok();
        let family = read.map(|(family, _)| family).unwrap_or_else(|error| {
            keep(error);
            families::unknown()
        });
        let lists = lists::of(directory, model.as_ref(), family.name);
        let differences = match family.name {
            FamilyName::MODEL_OPT => differences::of(directory, model.as_ref()),
            _ => vec![],
        };
        let family = Arc::new(family);
        let families = files.iter().map(|_| family.clone()).collect();
        let index = with_pieces(&files, index, &stored);
        let files = Files {
            files,
            families,
            index,
        };
        let catalogue = files.catalogue_with(options, &mut |error, name| {
            refused.push((error, name.to_string()));
            Ok(())
        });
        Self {
            files,
            catalogue: catalogue.unwrap_or_default(),
            refused,
            config: model,
            is_configured,
            lists,
            differences,
        }
    }

    fn own(&self) -> Option<&Family> {
        self.files.families.first().map(|family| &**family)
    }

    /// The family by the configuration, or by the names of the tensors.
    pub(crate) fn family(&self) -> FamilyName {
        self.own()
            .map_or(FamilyName::HIGH_PRECISION, |family| family.name)
    }

    /// Whether a configuration describes the quantization.
    pub(crate) fn has_source(&self) -> bool {
        self.own().is_some_and(|family| family.source.is_some())
    }

    /// Whether the configuration says that the layer at `path` is FP8.
    pub(crate) fn declares(&self, path: &str) -> bool {
        let declared = self.own().map(|family| (family.layer)(path));
        matches!(declared, Some(Ok(Some(_))))
    }

    /// Whether the family may have input scales that nothing uses.
    pub(crate) fn may_ignore_input_scales(&self) -> bool {
        self.own()
            .is_some_and(|family| family.may_ignore_input_scales)
    }

    /// All FP8 weights that the loader would accept.
    pub(crate) fn layers(&self) -> impl Iterator<Item = Layer<'_>> {
        self.catalogue
            .weights
            .iter()
            .map(|(name, weight)| self.layer(name, weight))
    }

    fn layer<'a>(&'a self, name: &'a str, weight: &'a Weight) -> Layer<'a> {
        Layer {
            path: match split(name) {
                (path, "weight") => path,
                _ => name,
            },
            codes: self.of_stored(&weight.codes),
            shape: weight.shape,
            granularity: weight.scheme.weight,
            inputs: weight.scheme.input,
            scale: weight.scale.as_ref().map(|scale| self.of_stored(scale)),
            input_scale: weight.input.as_ref().map(|scale| self.of_stored(scale)),
            is_tiled: weight.layout == ScaleLayout::Tiles,
        }
    }

    /// All other tensors by their canonical names, without scales of caches.
    pub(crate) fn values(&self) -> impl Iterator<Item = (&str, Tensor<'_>)> {
        let values = self.catalogue.values.iter();
        values.filter_map(|(name, value)| match value {
            Found::CacheScale { .. } => None,
            value => Some((name.as_str(), self.of_stored(value.stored()))),
        })
    }

    /// Scales of caches by their canonical names.
    pub(crate) fn cache_scales(&self) -> impl Iterator<Item = (&str, Tensor<'_>)> {
        let values = self.catalogue.values.iter();
        values.filter_map(|(name, value)| match value {
            Found::CacheScale { stored, .. } => Some((name.as_str(), self.of_stored(stored))),
            _ => None,
        })
    }

    /// Every tensor of the files, by its name there.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = Tensor<'_>> {
        let stored = self.files.index.iter();
        stored.map(|(name, file)| Tensor {
            file: &self.files.files[*file],
            name,
        })
    }

    /// A tensor by its name in the files.
    pub(crate) fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let (name, file) = self.files.index.get_key_value(name)?;
        Some(Tensor {
            file: &self.files.files[*file],
            name,
        })
    }

    /// Whether a scale of the shape `dims` fits the weight stored as `name`, as the configuration declares it.
    pub(crate) fn takes_shape(&self, name: &str, dims: &[usize]) -> bool {
        let (canonical, weight) = (self.canonical(name), self.tensor(name));
        let Some(&[n, k]) = weight.as_ref().map(Tensor::shape) else {
            return false;
        };
        let declared = self.own().map(|family| (family.layer)(split(&canonical).0));
        match declared {
            Some(Ok(Some(declared))) if declared.weight.is_some() => declared
                .weight
                .is_some_and(|granularity| has_shape(dims, granularity, n, k)),
            _ => granularity_by_shape(dims, n, k).is_some(),
        }
    }

    /// The canonical name of a stored name.
    pub(crate) fn canonical(&self, name: &str) -> String {
        match self.own() {
            Some(family) => (family.rename)(name).0,
            None => name.to_string(),
        }
    }

    /// What the configuration and the family call the layer's scale: stored names beside `weight` that another family uses.
    pub(crate) fn other_spelling(&self, weight: &str) -> Option<Tensor<'_>> {
        let (path, own) = split(weight);
        // torchao's names of a weight and its scale.
        let path_and_names = match own {
            "_weight_qdata" => path,
            _ => weight.strip_suffix(".weight").unwrap_or(path),
        };
        let mut names = WEIGHT_SCALES.iter().chain(&["scale"]);
        names.find_map(|own| self.tensor(&join(path_and_names, own)))
    }

    /// Whether a stored name ends like a scale of some family, and if so whether of a weight or of inputs.
    pub(crate) fn is_scale_name(name: &str) -> bool {
        let own = split(name).1;
        WEIGHT_SCALES.contains(&own) || INPUT_SCALES.contains(&own)
    }

    /// The FP8 weight at a canonical path.
    pub(crate) fn layer_at(&self, path: &str) -> Option<Layer<'_>> {
        let (name, weight) = self
            .catalogue
            .weights
            .get_key_value(&weight_name(path))
            .or_else(|| self.catalogue.weights.get_key_value(path))?;
        Some(self.layer(name, weight))
    }

    fn of_stored<'a>(&'a self, stored: &'a Stored) -> Tensor<'a> {
        Tensor {
            file: &self.files.files[stored.file],
            name: &stored.name,
        }
    }
}

/// The file of each name after tensors of all experts were cut into pieces.
fn with_pieces(
    files: &[SafetensorsFile],
    mut index: HashMap<String, usize>,
    stored: &[String],
) -> HashMap<String, usize> {
    index.retain(|name, at| files[*at].dtype(name).is_some());
    let known: std::collections::HashSet<&String> = stored.iter().collect();
    for (at, file) in files.iter().enumerate() {
        for name in file.names() {
            if !known.contains(&name) {
                index.entry(name).or_insert(at);
            }
        }
    }
    index
}
