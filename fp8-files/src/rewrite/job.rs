//! What all rewrites share: from layers, tensors and a configuration to a directory.

use super::companions::{self, Changes};
use super::directory::Staging;
use super::options::{WriteOptions, WriteReport};
use super::pipeline::Limits;
use super::progress::{Meter, OnProgress};
use super::shards::{self, Batch, Entry, PIECE};
use super::slabs;
use super::source::{Source, natural_order};
use super::spelling::Layout;
use crate::adapter::MERGED;
use crate::check::is_float;
use crate::contents::{Contents, Described};
use crate::error::{Error, Result};
use crate::load::StoredLayer;
use crate::names::{join, weight_name};
use crate::scheme::POWER_OF_TWO_INPUTS;
use crate::spelling::Spelling;
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;
use std::path::Path;

/// Everything known about a model before its first byte is written.
pub(super) struct Job<'a> {
    pub(super) source: &'a dyn Source,
    pub(super) target: &'a Path,
    pub(super) options: &'a WriteOptions,
    /// None for a model in high precision.
    pub(super) spelling: Option<Spelling>,
    pub(super) contents: Contents,
    /// Names of the tensors that are neither FP8 weights nor scales.
    pub(super) others: Vec<String>,
    pub(super) changes: Changes,
    /// The lists of the report that the job does not fill.
    pub(super) report: WriteReport,
}

/// Where the tensors of a batch come from.
enum Origin<'a> {
    /// An FP8 layer, and where its parts go.
    Layer(&'a Described, Vec<Layout>),
    /// Scales of attention.
    Scales(Vec<Tensor>),
    /// A tensor of the source, in this dtype.
    Other(&'a str, DType),
    /// A tensor of the source, as it is stored.
    Raw(&'a str),
}

impl Job<'_> {
    /// Writes the directory. `layer` returns the codes and scales of an FP8 layer.
    pub(super) fn run(
        &self,
        on_progress: &mut OnProgress<'_>,
        layer: impl Fn(&Described) -> Result<StoredLayer> + Sync,
    ) -> Result<WriteReport> {
        let slab = slabs::slab(self.options.memory);
        let batches = self.batches(slab)?;
        let config = self.source.config();
        let directory = self.source.directory();
        // A `config.json` with a quantization alone would open nowhere.
        if let (None, Some(path)) = (config, &directory)
            && path.join("params.json").is_file()
        {
            return Err(Error::MissingConfig { path: path.clone() });
        }
        let staging = Staging::new(self.target, self.options.overwrite)?;
        let bytes = batches.iter().map(Batch::bytes).sum();
        let mut meter = Meter::new(on_progress, bytes);
        let mut files = shards::write(
            staging.path(),
            &batches,
            self.options.shard_bytes,
            &self.metadata(&batches)?,
            Limits {
                threads: self.options.threads,
                memory: self.options.memory,
            },
            &mut meter,
            |origin, places| match origin {
                Origin::Layer(described, layouts) => {
                    let layer = layer(described)?;
                    for (i, layout) in layouts.iter().enumerate() {
                        let tensor = layout.tensor(&layer.path, &layer.codes, &layer.input)?;
                        places.write(i, &tensor)?;
                    }
                    Ok(())
                }
                Origin::Scales(tensors) => {
                    let mut tensors = tensors.iter().enumerate();
                    tensors.try_for_each(|(i, tensor)| places.write(i, tensor))
                }
                Origin::Other(name, dtype) => {
                    let write = |first, tensor: Tensor| places.write_rows(0, first, &tensor);
                    slabs::each(self.source, name, *dtype, (1, slab), write)
                }
                Origin::Raw(name) => places.copy(0, |bytes| self.source.raw_bytes(name, bytes)),
            },
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
        meter.next("", 0)?;
        let directory = staging.target().to_path_buf();
        staging.finish()?;
        files.sort();
        let layers = self.contents.layers.iter();
        let spelling = self.spelling;
        let unread = spelling.map(|spelling| spelling.unread_by_vllm(&self.contents));
        Ok(WriteReport {
            directory,
            files,
            quantized: layers.map(|layer| layer.path.clone()).collect(),
            ignored: self.contents.ignored.clone(),
            dequantized: self.dequantized(),
            unread_by_vllm: unread.unwrap_or_default(),
            bytes,
            ..self.report.clone()
        })
    }

    /// Paths of the weights that are FP8 in the source only, in the order of the model.
    fn dequantized(&self) -> Vec<String> {
        let others = self.others.iter();
        let fp8 = others.filter(|name| self.source.is_fp8(name));
        let paths = fp8.map(|name| name.strip_suffix(".weight").unwrap_or(name).to_string());
        let mut paths: Vec<String> = paths.collect();
        paths.sort_by_cached_key(|path| natural_order(path));
        paths
    }

    /// All tensors in the order of the model, so that those of a layer lie in one file.
    fn batches(&self, slab: usize) -> Result<Vec<Batch<Origin<'_>>>> {
        let mut batches = vec![];
        if let Some(spelling) = self.spelling {
            for layer in &self.contents.layers {
                let layouts = spelling.layouts(layer);
                let entry = |layout: &Layout| Entry {
                    name: join(&layer.path, layout.own),
                    dtype: layout.dtype.into(),
                    dims: layout.dims.clone(),
                };
                let (n, k) = layer.sizes;
                let values = slabs::bytes(self.source, &weight_name(&layer.path), n * k, slab)?;
                batches.push(Batch {
                    entries: layouts.iter().map(entry).collect(),
                    source: Origin::Layer(layer, layouts),
                    // The codes twice, as they are computed and as they are written, and values.
                    cost: (n * k * 2 + values) as u64,
                });
            }
            for tensors in spelling.attention_tensors(&self.contents)? {
                let entry = |(name, tensor): &(String, Tensor)| Entry {
                    name: name.clone(),
                    dtype: tensor.dtype().into(),
                    dims: tensor.dims().to_vec(),
                };
                batches.push(Batch {
                    entries: tensors.iter().map(entry).collect(),
                    cost: 0,
                    source: Origin::Scales(tensors.into_iter().map(|(_, tensor)| tensor).collect()),
                });
            }
        }
        for name in &self.others {
            let dims = self.source.shape(name).unwrap_or_default();
            if let Some(dtype) = self.source.raw_dtype(name) {
                let entry = Entry {
                    name: name.clone(),
                    dtype,
                    dims,
                };
                batches.push(Batch {
                    cost: entry.bytes().min(PIECE as u64),
                    source: Origin::Raw(name),
                    entries: vec![entry],
                });
                continue;
            }
            let stored = self.source.dtype(name);
            let dtype = match self.changes.dtype {
                Some(dtype) => stored.filter(|stored| !is_float(*stored)).unwrap_or(dtype),
                None => stored.unwrap_or(self.changes.default_dtype),
            };
            let entry = Entry {
                name: name.clone(),
                dtype: dtype.into(),
                dims,
            };
            let elements = entry.dims.iter().product::<usize>();
            batches.push(Batch {
                entries: vec![entry],
                source: Origin::Other(name, dtype),
                cost: slabs::bytes(self.source, name, elements, slab)? as u64,
            });
        }
        batches.sort_by_cached_key(|batch| natural_order(batch.name()));
        Ok(batches)
    }

    fn metadata(&self, batches: &[Batch<Origin<'_>>]) -> Result<BTreeMap<String, String>> {
        let mut metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
        let written = |name: &str| {
            let mut entries = batches.iter().flat_map(|batch| &batch.entries);
            entries.any(|entry| entry.name == name)
        };
        let tied = self.source.tied().into_iter();
        metadata.extend(tied.filter(|(name, other)| !written(name) && written(other)));
        let power_of_two = self.contents.power_of_two_inputs();
        // Other families have a key for it in their configuration.
        if self.spelling == Some(Spelling::CompressedTensors) && !power_of_two.is_empty() {
            let layers = serde_json::Value::from(power_of_two).to_string();
            metadata.insert(POWER_OF_TWO_INPUTS.to_string(), layers);
        }
        let adapters = self.source.merged_adapters()?;
        if !adapters.is_empty() {
            let adapters = serde_json::Value::from(adapters).to_string();
            metadata.insert(MERGED.to_string(), adapters);
        }
        Ok(metadata)
    }
}
