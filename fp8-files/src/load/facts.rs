//! What an open checkpoint says of itself: family, names, shapes, dtypes, configuration.

use super::{Checkpoint, FamilyName, catalogue};
use crate::names;
use safetensors::Dtype;

impl Checkpoint {
    /// Which family of checkpoints it is: that of the first file with FP8 in it.
    pub fn family(&self) -> FamilyName {
        let fp8 = self
            .catalogue
            .weights
            .values()
            .map(|weight| weight.codes.file);
        let codes = self
            .catalogue
            .values
            .values()
            .filter_map(|value| match value {
                catalogue::Value::Codes(stored) => Some(stored.file),
                _ => None,
            });
        let first = fp8.chain(codes).min();
        first.map_or(FamilyName::HighPrecision, |file| self.families[file].name())
    }

    /// Canonical paths of the layers whose weight is FP8, sorted.
    pub fn layer_paths(&self) -> Vec<String> {
        let names = self.catalogue.weights.keys();
        let paths = names.filter_map(|name| match names::split(name) {
            (path, "weight") => Some(path.to_string()),
            _ => None,
        });
        let mut paths: Vec<String> = paths.collect();
        paths.sort_unstable();
        paths
    }

    /// Canonical names of everything that is neither an FP8 weight of a layer nor a scale of one, sorted: biases, norms,
    /// embeddings, weights in high precision, scales of caches.
    pub fn other_names(&self) -> Vec<String> {
        let tables = self.catalogue.weights.keys();
        let tables = tables.filter(|name| names::split(name).1 != "weight");
        let mut names: Vec<String> = self
            .catalogue
            .values
            .keys()
            .chain(tables)
            .cloned()
            .collect();
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
            Some(catalogue::Value::CacheScale { .. }) => Some(Dtype::F32),
            Some(value) => self.stored_dtype(value.stored()),
            None => self.files[*self.index.get(name)?].dtype(name),
        }
    }

    /// Shape of a tensor, by its canonical name or as stored.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        if let Some(weight) = self.catalogue.weights.get(name) {
            return Some(&weight.shape);
        }
        match self.catalogue.values.get(name) {
            Some(catalogue::Value::CacheScale { shape, .. }) => Some(shape),
            Some(value) => {
                let stored = value.stored();
                self.files[stored.file].shape(&stored.name)
            }
            None => self.files[*self.index.get(name)?].shape(name),
        }
    }

    fn stored_dtype(&self, stored: &catalogue::Stored) -> Option<Dtype> {
        self.files[stored.file].dtype(&stored.name)
    }

    /// Names of all tensors as they are stored, sorted.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.index.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    /// Value of a metadata key in the first file that has it.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.files.iter().find_map(|file| file.metadata(key))
    }
}
