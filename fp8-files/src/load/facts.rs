//! Facts about an open checkpoint: family, names, shapes, dtypes, configuration.

use super::catalogue::Value;
use super::{Checkpoint, FamilyName};
use crate::contents::Described;
use crate::names::{split, weight_name};
use crate::scheme::LayerScheme;
use safetensors::Dtype;
use std::path::Path;

impl Checkpoint {
    /// The family of the first file with FP8 tensors.
    pub fn family(&self) -> FamilyName {
        let weights = self.catalogue.weights.values().map(|weight| &weight.codes);
        let values = self.catalogue.values.values();
        let codes = values.filter_map(|value| match value {
            Value::Codes(stored) => Some(stored),
            _ => None,
        });
        let first = weights.chain(codes).min_by_key(|stored| stored.file);
        first.map_or(FamilyName::HIGH_PRECISION, |stored| {
            self.files.family(stored).name
        })
    }

    /// Canonical paths of the layers whose weight is FP8, sorted.
    pub fn layer_paths(&self) -> Vec<String> {
        let names = self.catalogue.weights.keys();
        let paths = names.filter_map(|name| match split(name) {
            (path, "weight") => Some(path.to_string()),
            _ => None,
        });
        let mut paths: Vec<String> = paths.collect();
        paths.sort_unstable();
        paths
    }

    /// How the FP8 layer at a canonical path is stored; None if there is none.
    pub fn layer_scheme(&self, path: &str) -> Option<LayerScheme> {
        let weight = self.catalogue.weights.get(&weight_name(path))?;
        Some(weight.scheme)
    }

    /// Whether the file has the FP8 layer at a canonical path in FP4 (MXFP4 or NVFP4). Its codes are then the E4M3 codes of the same
    /// values; see the guide on files and models for its scales.
    pub fn is_fp4(&self, path: &str) -> bool {
        let weight = self.catalogue.weights.get(&weight_name(path));
        weight.is_some_and(|weight| weight.fp4)
    }

    /// Canonical names of everything that is neither an FP8 weight of a layer nor a scale of one, sorted: biases, norms,
    /// embeddings, weights in high precision, scales of caches.
    pub fn other_names(&self) -> Vec<String> {
        let mut names = self.value_names();
        let weights = &self.catalogue.weights;
        names.retain(|name| split(name).1 != "weight" || !weights.contains_key(name));
        names
    }

    /// Canonical names of all tensors that have a value of their own, sorted.
    pub(super) fn value_names(&self) -> Vec<String> {
        let catalogue = &self.catalogue;
        let names = catalogue.weights.keys().chain(catalogue.values.keys());
        let mut names: Vec<String> = names.cloned().collect();
        names.sort_unstable();
        names
    }

    /// The model's `config.json` as it was read; None if there is none.
    pub fn config(&self) -> Option<&serde_json::Value> {
        self.config.as_ref()
    }

    /// Mistral's `params.json` as it was read; None if there is none, or the files are not Mistral's own.
    pub fn params(&self) -> Option<&serde_json::Value> {
        self.params.as_ref()
    }

    /// Dtype of a tensor, by its canonical name or as stored. Weights of four codes in a word are F8_E4M3, scales of caches F32.
    pub fn dtype(&self, name: &str) -> Option<Dtype> {
        if self.catalogue.weights.contains_key(name) {
            return Some(Dtype::F8_E4M3);
        }
        match self.catalogue.values.get(name) {
            Some(Value::CacheScale { .. }) => Some(Dtype::F32),
            Some(value) => self.files.dtype(value.stored()),
            None => self.files.files[*self.files.index.get(name)?].dtype(name),
        }
    }

    /// Shape of a tensor, by its canonical name or as stored.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        if let Some(weight) = self.catalogue.weights.get(name) {
            return Some(&weight.shape);
        }
        match self.catalogue.values.get(name) {
            Some(Value::CacheScale { shape, .. }) => Some(shape),
            Some(value) => Some(self.files.shape(value.stored())),
            None => self.files.files[*self.files.index.get(name)?].shape(name),
        }
    }

    /// Names of all tensors as they are stored, sorted.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.files.index.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    /// Value of a metadata key in the first file that has it.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        let mut files = self.files.files.iter();
        files.find_map(|file| file.metadata(key))
    }

    /// How the FP8 layer at `path` is stored, without reading it.
    pub(crate) fn described(&self, path: &str) -> Option<Described> {
        let weight = self.catalogue.weights.get(&weight_name(path))?;
        let [n, k] = weight.shape;
        Some(Described {
            path: path.to_string(),
            scheme: weight.scheme,
            sizes: (n, k),
        })
    }

    /// Whether the value of a tensor is made of codes.
    pub(crate) fn holds_codes(&self, name: &str) -> bool {
        let codes = matches!(self.catalogue.values.get(name), Some(Value::Codes(_)));
        codes || self.catalogue.weights.contains_key(name)
    }

    /// The directory of its first file.
    pub(crate) fn directory(&self) -> Option<&Path> {
        let path = self.files.files.first()?.path();
        Some(path.parent().unwrap_or(Path::new("")))
    }
}
