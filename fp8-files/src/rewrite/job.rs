//! What all rewrites have in common: from tensors and a configuration to a directory.

use super::companions::{self, Changes};
use super::directory::Staging;
use super::options::{WriteOptions, WriteReport};
use super::progress::{Meter, OnProgress};
use super::shards::{self, Batch};
use super::source::Source;
use crate::contents::Contents;
use crate::error::{Error, Result};
use crate::scheme::POWER_OF_TWO_INPUTS;
use crate::spelling::Spelling;
use candle_core::Tensor;
use std::collections::BTreeMap;
use std::path::Path;

/// Everything that is known of a model before the first byte of it is written.
pub(super) struct Job<'a, S> {
    pub(super) source: &'a dyn Source,
    pub(super) target: &'a Path,
    pub(super) options: &'a WriteOptions,
    /// In the order in which they are written.
    pub(super) batches: Vec<Batch<S>>,
    pub(super) contents: Contents,
    /// None for a model in high precision.
    pub(super) spelling: Option<Spelling>,
    pub(super) changes: Changes,
    pub(super) unmatched: Vec<String>,
    pub(super) exact_inputs: Vec<String>,
    /// Layers whose FP8 weights are rounded anew.
    pub(super) requantized: Vec<String>,
}

impl<S> Job<'_, S> {
    /// `make` gives the tensors of a batch, in the order of its entries.
    pub(super) fn run(
        self,
        on_progress: &mut OnProgress<'_>,
        make: impl FnMut(&S) -> Result<Vec<Tensor>>,
    ) -> Result<WriteReport> {
        let config = self.source.config();
        let directory = self.source.directory();
        // A `config.json` of a quantization alone would open nowhere.
        if let (None, Some(path)) = (config, &directory)
            && path.join("params.json").is_file()
        {
            return Err(Error::MissingConfig { path: path.clone() });
        }
        let staging = Staging::new(self.target, self.options.overwrite)?;
        let bytes = self.batches.iter().map(Batch::bytes).sum();
        let mut meter = Meter::new(on_progress, bytes);
        let mut files = shards::write(
            staging.path(),
            &self.batches,
            self.options.shard_bytes,
            &self.metadata(),
            &mut meter,
            make,
        )?;
        for (name, value) in
            companions::configs(config, self.spelling, &self.contents, self.changes)
        {
            shards::write_json(&staging.path().join(name), &value)?;
            files.push(name.to_string());
        }
        for (name, value) in self.source.files()? {
            shards::write_json(&staging.path().join(&name), &value)?;
            files.push(name);
        }
        if let Some(directory) = directory {
            files.extend(companions::copy(&directory, staging.path())?);
        }
        meter.end()?;
        let directory = staging.target().to_path_buf();
        staging.finish()?;
        files.sort();
        let layers = self.contents.layers.into_iter();
        Ok(WriteReport {
            directory,
            files,
            quantized: layers.map(|layer| layer.path).collect(),
            requantized: self.requantized,
            ignored: self.contents.ignored,
            unmatched: self.unmatched,
            exact_inputs: self.exact_inputs,
            bytes,
        })
    }

    fn metadata(&self) -> BTreeMap<String, String> {
        let mut metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
        let written = |name: &str| {
            let mut entries = self.batches.iter().flat_map(|batch| &batch.entries);
            entries.any(|entry| entry.name == name)
        };
        let tied = self.source.tied().into_iter();
        metadata.extend(tied.filter(|(name, other)| !written(name) && written(other)));
        let power_of_two = self.contents.power_of_two_inputs();
        // Others say it in their configuration.
        if self.spelling == Some(Spelling::CompressedTensors) && !power_of_two.is_empty() {
            let layers = serde_json::Value::from(power_of_two).to_string();
            metadata.insert(POWER_OF_TWO_INPUTS.to_string(), layers);
        }
        metadata
    }
}
