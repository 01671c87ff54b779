//! Safetensors files of a given size, written layer by layer.
//!
//! The header is made from shapes alone. It lists tensors by falling element size, so that each is aligned to its element; each tensor is
//! written to its place when its layer is done.

use super::pipeline::{self, Limits};
use super::positioned::PositionedFile;
use super::progress::Meter;
use crate::atomic::{self, FileError, Header, write_tensor_data};
use crate::error::{Error, Result};
use candle_core::Tensor;
use safetensors::Dtype;
use serde_json::{Map, Value, json};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes that are copied at a time, of a tensor that is written as it is stored.
pub(super) const PIECE: usize = 1 << 20;

/// A tensor that will be written.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) dims: Vec<usize>,
}

impl Entry {
    pub(super) fn bytes(&self) -> u64 {
        let elements: usize = self.dims.iter().product();
        (elements * self.dtype.bitsize() / 8) as u64
    }
}

/// Tensors that are computed together and stored in one file.
#[derive(Debug, Clone)]
pub(super) struct Batch<S> {
    /// Where the tensors come from.
    pub(super) source: S,
    pub(super) entries: Vec<Entry>,
    /// Bytes of memory that computing and writing it takes.
    pub(super) cost: u64,
}

impl<S> Batch<S> {
    pub(super) fn bytes(&self) -> u64 {
        self.entries.iter().map(Entry::bytes).sum()
    }

    pub(super) fn name(&self) -> &str {
        self.entries.first().map_or("", |entry| &entry.name)
    }
}

/// Where the tensors of a batch go.
pub(super) struct Places<'a> {
    shard: &'a Shard,
    entries: &'a [Entry],
}

impl Places<'_> {
    /// Writes the whole of an entry.
    pub(super) fn write(&self, entry: usize, tensor: &Tensor) -> Result<()> {
        let expected = &self.entries[entry];
        if tensor.dims() != expected.dims {
            return Err(self.unfit(expected, tensor));
        }
        self.write_rows(entry, 0, tensor)
    }

    /// Writes some rows of an entry, from `first` on.
    pub(super) fn write_rows(&self, entry: usize, first: usize, tensor: &Tensor) -> Result<()> {
        let expected = &self.entries[entry];
        let rest = |dims: &[usize]| dims.get(1..).unwrap_or_default().to_vec();
        let row: usize = rest(&expected.dims).iter().product();
        let rows = tensor.dims().first().copied().unwrap_or(1);
        let all = expected.dims.first().copied().unwrap_or(1);
        let fits = Dtype::from(tensor.dtype()) == expected.dtype
            && tensor.rank() == expected.dims.len()
            && rest(tensor.dims()) == rest(&expected.dims);
        if !fits || first + rows > all {
            return Err(self.unfit(expected, tensor));
        }
        let skipped = first * row * expected.dtype.bitsize() / 8;
        self.shard.write(&expected.name, skipped as u64, tensor)
    }

    /// Writes the whole of an entry, whose bytes `read` gives by their positions.
    pub(super) fn copy(
        &self,
        entry: usize,
        read: impl Fn(Range<usize>) -> Result<Vec<u8>>,
    ) -> Result<()> {
        let entry = &self.entries[entry];
        let all = entry.bytes() as usize;
        for first in (0..all).step_by(PIECE) {
            let piece = first..all.min(first + PIECE);
            let bytes = read(piece.clone())?;
            if bytes.len() != piece.len() {
                return Err(Error::TensorShape {
                    tensor: entry.name.clone(),
                    got: vec![bytes.len()],
                    expected: format!("the bytes {piece:?} of {all}"),
                });
            }
            self.shard.write_bytes(&entry.name, first as u64, &bytes)?;
        }
        Ok(())
    }

    fn unfit(&self, expected: &Entry, tensor: &Tensor) -> Error {
        let reason = format!(
            "tensor `{}` came as {:?} {:?}, its header says {:?} {:?}",
            expected.name,
            tensor.dtype(),
            tensor.dims(),
            expected.dtype,
            expected.dims
        );
        candle_core::Error::msg(reason).into()
    }
}

/// Writes all batches into `directory`, with an index if they fill several files. Returns the names of the files.
///
/// `make` writes the tensors of a batch to their places, in any thread; batches begin in their order. The files are the same for any
/// number of threads.
pub(super) fn write<S: Sync>(
    directory: &Path,
    batches: &[Batch<S>],
    shard_bytes: u64,
    metadata: &BTreeMap<String, String>,
    limits: Limits,
    meter: &mut Meter<'_, '_>,
    make: impl Fn(&S, &Places<'_>) -> Result<()> + Sync,
) -> Result<Vec<String>> {
    let shards = split(batches, shard_bytes);
    let mut files = vec![];
    let mut weight_map = Map::new();
    // The shard of each batch.
    let mut numbers = vec![];
    for (i, shard) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => "model.safetensors".to_string(),
            count => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
        };
        for entry in shard.iter().flat_map(|batch| &batch.entries) {
            weight_map.insert(entry.name.clone(), name.clone().into());
        }
        numbers.extend(shard.iter().map(|_| i));
        files.push(name);
    }
    let open: Vec<Mutex<Option<Arc<Shard>>>> = shards.iter().map(|_| Mutex::default()).collect();
    let shard = |i: usize| {
        open[numbers[i]]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    };
    let costs: Vec<u64> = batches.iter().map(|batch| batch.cost).collect();
    let begin = |i: usize| {
        meter.next(batches[i].name(), batches[i].bytes())?;
        let mut open = shard(i);
        if open.is_none() {
            let number = numbers[i];
            let path = directory.join(&files[number]);
            *open = Some(Arc::new(Shard::create(path, shards[number], metadata)?));
        }
        Ok(())
    };
    pipeline::run(&costs, limits, begin, |i| {
        let batch = &batches[i];
        let Some(file) = shard(i).clone() else {
            return Err(candle_core::Error::msg("a file is closed too early").into());
        };
        let places = Places {
            shard: &file,
            entries: &batch.entries,
        };
        make(&batch.source, &places)?;
        // The last batch of a file closes it.
        if file.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            file.sync()?;
            *shard(i) = None;
        }
        Ok(())
    })?;
    // No batch begins a file without tensors, but a directory without any file would not open.
    if batches.is_empty() {
        for name in &files {
            Shard::create(directory.join(name), batches, metadata)?.sync()?;
        }
    }
    if files.len() > 1 {
        let total: u64 = batches.iter().map(Batch::bytes).sum();
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
struct Shard {
    path: PathBuf,
    file: PositionedFile,
    /// Where each tensor begins.
    offsets: BTreeMap<String, u64>,
    /// Batches that are not in it yet.
    left: AtomicUsize,
}

impl Shard {
    fn create<S>(
        path: PathBuf,
        batches: &[Batch<S>],
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self> {
        let mut entries: Vec<&Entry> = batches.iter().flat_map(|batch| &batch.entries).collect();
        entries.sort_by_key(|entry| (Reverse(entry.dtype.bitsize()), &entry.name));
        let mut header = Header::new(Some(json!(metadata)));
        let mut offsets = BTreeMap::new();
        for Entry { name, dtype, dims } in entries {
            let start = header.add(&path, name, *dtype, dims)?;
            if offsets.insert(name.clone(), start).is_some() {
                let tensor = name.clone();
                return Err(Error::NameClash { tensor });
            }
        }
        let (header, length) = header.finish();
        offsets
            .values_mut()
            .for_each(|offset| *offset += header.len() as u64);
        let file = File::create_new(&path).map_err(FileError::io(&path, "create it"))?;
        // If the system reserves the space, a full disk is an error here, before the work begins.
        file.set_len(length)
            .map_err(FileError::io(&path, "make it as long as it will be"))?;
        let file = PositionedFile::new(file);
        let written = file.at(0).write_all(&header);
        written.map_err(FileError::io(&path, "write"))?;
        Ok(Self {
            path,
            file,
            offsets,
            left: AtomicUsize::new(batches.len()),
        })
    }

    /// Writes a tensor, or a part of it that begins `skipped` bytes after its beginning.
    fn write(&self, name: &str, skipped: u64, tensor: &Tensor) -> Result<()> {
        let offset = self.offsets.get(name).copied().unwrap_or_default();
        let mut writer = self.file.at(offset + skipped);
        Ok(write_tensor_data(&mut writer, &self.path, name, tensor)?)
    }

    /// Writes some bytes of a tensor, `skipped` bytes after its beginning.
    fn write_bytes(&self, name: &str, skipped: u64, bytes: &[u8]) -> Result<()> {
        let offset = self.offsets.get(name).copied().unwrap_or_default();
        let written = self.file.at(offset + skipped).write_all(bytes);
        Ok(written.map_err(FileError::io(&self.path, "write"))?)
    }

    fn sync(&self) -> Result<()> {
        let synced = self.file.sync();
        Ok(synced.map_err(FileError::io(&self.path, "write"))?)
    }
}

/// Writes a JSON file.
pub(super) fn write_json(path: &Path, value: &Value) -> Result<()> {
    let io = FileError::io(path, "write");
    let mut file = File::create_new(path).map_err(FileError::io(path, "write"))?;
    atomic::write_json(&mut file, path, value)?;
    Ok(file.sync_all().map_err(io)?)
}
