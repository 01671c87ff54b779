//! Safetensors files of a given size, written layer by layer.
//!
//! The header is made from shapes alone. It lists tensors by falling element size, so that each is aligned to its element; each tensor is
//! written to its place when its layer is done.

use super::progress::Meter;
use crate::atomic::{self, BUFFER, FileError, Header, write_tensor_data};
use crate::error::{Error, Result};
use candle_core::{DType, Tensor};
use serde_json::{Map, Value, json};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

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

/// Tensors that are computed together and stored in one file.
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

    pub(super) fn name(&self) -> &str {
        self.entries.first().map_or("", |entry| &entry.name)
    }
}

/// Writes all batches into `directory`, in their order, with an index if they fill several files. Returns the names of the files.
///
/// `make` gives the tensors of a batch, in the order of its entries. One batch is in memory at a time.
pub(super) fn write<S>(
    directory: &Path,
    batches: &[Batch<S>],
    shard_bytes: u64,
    metadata: &BTreeMap<String, String>,
    meter: &mut Meter<'_, '_>,
    mut make: impl FnMut(&S) -> Result<Vec<Tensor>>,
) -> Result<Vec<String>> {
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

/// Splits the batches into runs that fit into one file each.
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

/// A safetensors file that is being written.
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
        let mut entries: Vec<&Entry> = batches.iter().flat_map(|batch| &batch.entries).collect();
        entries.sort_by_key(|entry| (Reverse(entry.dtype.size_in_bytes()), &entry.name));
        let mut header = Header::new(Some(json!(metadata)));
        let mut offsets = BTreeMap::new();
        for Entry { name, dtype, dims } in entries {
            let start = header.add(path, name, *dtype, dims)?;
            if offsets.insert(name.clone(), start).is_some() {
                let tensor = name.clone();
                return Err(Error::NameClash { tensor });
            }
        }
        let (header, length) = header.finish();
        offsets
            .values_mut()
            .for_each(|offset| *offset += header.len() as u64);
        let file = File::create_new(path).map_err(FileError::io(path, "create it"))?;
        // Where the system reserves space, a disk that is too small fails here, before the work.
        file.set_len(length)
            .map_err(FileError::io(path, "make it as long as it will be"))?;
        let mut file = BufWriter::with_capacity(BUFFER, file);
        file.write_all(&header)
            .map_err(FileError::io(path, "write"))?;
        Ok(Self {
            path,
            file,
            offsets,
        })
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
            .map_err(FileError::io(self.path, "write"))?;
        Ok(write_tensor_data(
            &mut self.file,
            self.path,
            &entry.name,
            tensor,
        )?)
    }

    fn finish(self) -> Result<()> {
        let file = self.file.into_inner().map_err(|error| error.into_error());
        let synced = file.and_then(|file| file.sync_all());
        Ok(synced.map_err(FileError::io(self.path, "write"))?)
    }
}

/// Writes a JSON file.
pub(super) fn write_json(path: &Path, value: &Value) -> Result<()> {
    let io = FileError::io(path, "write");
    let mut file = File::create_new(path).map_err(FileError::io(path, "write"))?;
    atomic::write_json(&mut file, path, value)?;
    Ok(file.sync_all().map_err(io)?)
}
