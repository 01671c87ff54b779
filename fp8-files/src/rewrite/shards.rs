//! Safetensors files of a given size, written layer by layer.
//!
//! The header is made from shapes alone. Tensors lie in it by falling element size, so that each is aligned to its
//! element, and are written at their place whenever their layer's turn comes.

use super::progress::Meter;
use crate::atomic::{FileError, write_tensor_data};
use crate::error::{Error, Result};
use candle_core::{DType, Tensor};
use safetensors::Dtype;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

/// Buffer between a writer and its file.
const BUFFER: usize = 1 << 20;

/// A tensor that will be written.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) dtype: DType,
    pub(super) dims: Vec<usize>,
}

impl Entry {
    pub(super) fn bytes(&self) -> u64 {
        let elements: usize = self.dims.iter().product();
        (elements * self.dtype.size_in_bytes()) as u64
    }
}

/// Tensors that are made together and lie in one file.
#[derive(Debug, Clone)]
pub(super) struct Batch<S> {
    /// Where the tensors come from.
    pub(super) source: S,
    pub(super) entries: Vec<Entry>,
}

impl<S> Batch<S> {
    pub(super) fn bytes(&self) -> u64 {
        self.entries.iter().map(Entry::bytes).sum()
    }

    fn name(&self) -> &str {
        self.entries.first().map_or("", |entry| &entry.name)
    }
}

/// Names of the files written.
pub(super) type Files = Vec<String>;

/// Writes all batches into `directory`, in their order, with an index if they fill several files.
///
/// `make` gives the tensors of a batch, in the order of its entries. One batch is in memory at a time.
pub(super) fn write<S>(
    directory: &Path,
    batches: &[Batch<S>],
    shard_bytes: u64,
    metadata: &BTreeMap<String, String>,
    meter: &mut Meter<'_, '_>,
    mut make: impl FnMut(&S) -> Result<Vec<Tensor>>,
) -> Result<Files> {
    let shards = split(batches, shard_bytes);
    let mut files = vec![];
    let mut weight_map = Map::new();
    let mut total = 0;
    for (i, shard) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => "model.safetensors".to_string(),
            count => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
        };
        let path = directory.join(&name);
        let mut file = Shard::create(&path, shard, metadata)?;
        for batch in *shard {
            meter.next(batch.name(), batch.bytes())?;
            let tensors = make(&batch.source)?;
            for (entry, tensor) in batch.entries.iter().zip(&tensors) {
                file.write(entry, tensor)?;
                weight_map.insert(entry.name.clone(), name.clone().into());
            }
            total += batch.bytes();
        }
        file.finish()?;
        files.push(name);
    }
    if files.len() > 1 {
        let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
        let name = "model.safetensors.index.json";
        write_json(&directory.join(name), &index)?;
        files.push(name.to_string());
    }
    Ok(files)
}

/// Runs of batches that fit into a file each.
fn split<S>(batches: &[Batch<S>], shard_bytes: u64) -> Vec<&[Batch<S>]> {
    let mut shards = vec![];
    let (mut start, mut bytes) = (0, 0u64);
    for (i, batch) in batches.iter().enumerate() {
        let more = batch.bytes();
        if i > start && bytes.saturating_add(more) > shard_bytes {
            shards.push(&batches[start..i]);
            (start, bytes) = (i, 0);
        }
        bytes = bytes.saturating_add(more);
    }
    shards.push(&batches[start..]);
    shards
}

/// A safetensors file in the making.
struct Shard<'a> {
    path: &'a Path,
    file: BufWriter<File>,
    /// Where each tensor begins.
    offsets: BTreeMap<String, u64>,
}

impl<'a> Shard<'a> {
    fn create<S>(
        path: &'a Path,
        batches: &[Batch<S>],
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self> {
        let entries = batches.iter().flat_map(|batch| &batch.entries);
        let (header, offsets, end) = header(path, entries, metadata)?;
        let file = File::create_new(path).map_err(io(path, "create it"))?;
        // A disk that is too small is known before the work where the system reserves space.
        file.set_len(end)
            .map_err(io(path, "make it as long as it will be"))?;
        let mut shard = Self {
            path,
            file: BufWriter::with_capacity(BUFFER, file),
            offsets,
        };
        let length = (header.len() as u64).to_le_bytes();
        let write = io(path, "write");
        let written = shard.file.write_all(&length);
        written
            .and_then(|()| shard.file.write_all(&header))
            .map_err(write)?;
        Ok(shard)
    }

    fn write(&mut self, entry: &Entry, tensor: &Tensor) -> Result<()> {
        let fits = tensor.dtype() == entry.dtype && tensor.dims() == entry.dims;
        let Some(&offset) = self.offsets.get(&entry.name).filter(|_| fits) else {
            let reason = format!(
                "tensor `{}` came as {:?} {:?}, its header says {:?} {:?}",
                entry.name,
                tensor.dtype(),
                tensor.dims(),
                entry.dtype,
                entry.dims
            );
            return Err(candle_core::Error::msg(reason).into());
        };
        self.file
            .seek(SeekFrom::Start(offset))
            .map_err(io(self.path, "write"))?;
        Ok(write_tensor_data(
            &mut self.file,
            self.path,
            &entry.name,
            tensor,
        )?)
    }

    fn finish(self) -> Result<()> {
        let file = self.file.into_inner().map_err(|error| error.into_error());
        file.and_then(|file| file.sync_all())
            .map_err(io(self.path, "write"))
    }
}

/// Bytes of the header without its length, where each tensor begins in the file, and where the file ends.
fn header<'a>(
    path: &Path,
    entries: impl Iterator<Item = &'a Entry>,
    metadata: &BTreeMap<String, String>,
) -> Result<(Vec<u8>, BTreeMap<String, u64>, u64)> {
    let mut order: Vec<&Entry> = entries.collect();
    order.sort_by_key(|entry| (std::cmp::Reverse(entry.dtype.size_in_bytes()), &entry.name));
    let mut json = Map::new();
    json.insert("__metadata__".into(), json!(metadata));
    let mut offsets = BTreeMap::new();
    let mut end = 0;
    for entry in order {
        let start = end;
        end += entry.bytes();
        let dtype: Dtype = entry.dtype.into();
        let value = json!({ "dtype": dtype, "shape": entry.dims, "data_offsets": [start, end] });
        if json.insert(entry.name.clone(), value).is_some() {
            let (path, name) = (path.to_path_buf(), entry.name.clone());
            return Err(match name == "__metadata__" {
                true => FileError::ReservedName { path, name }.into(),
                false => Error::NameClash { tensor: name },
            });
        }
        offsets.insert(entry.name.clone(), start);
    }
    let mut header = Value::Object(json).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let base = 8 + header.len() as u64;
    for offset in offsets.values_mut() {
        *offset += base;
    }
    Ok((header, offsets, base + end))
}

/// A JSON file of its own.
pub(super) fn write_json(path: &Path, value: &Value) -> Result<()> {
    let written = serde_json::to_vec_pretty(value)
        .map_err(std::io::Error::from)
        .and_then(|mut text| {
            text.push(b'\n');
            let mut file = File::create_new(path)?;
            file.write_all(&text)?;
            file.sync_all()
        });
    written.map_err(io(path, "write"))
}

fn io(path: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    move |source| {
        FileError::Io {
            path: path.to_path_buf(),
            action,
            source,
        }
        .into()
    }
}
