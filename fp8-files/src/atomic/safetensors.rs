//! Writes named tensors in the safetensors format, streamed and in a fixed order.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::path::Path;

use candle_core::{CpuStorage, Device, Storage, Tensor};
use safetensors::Dtype;
use serde_json::{Map, Value, json};

use super::{FileError, replace_file};

/// Elements converted to bytes at a time.
const CHUNK: usize = 1 << 14;
/// Key of the metadata in the header.
pub(crate) const METADATA: &str = "__metadata__";

/// Replaces the file at `path` atomically by a safetensors file of these tensors.
///
/// The same tensors and metadata always give the same bytes: tensors are ordered by falling element
/// size, then by name (so every tensor is aligned to its element), metadata by key. Tensors are written from their memory in small pieces; only strided tensors and those on an
/// accelerator are copied, one at a time.
///
/// # Errors
/// [`FileError`] naming the path, and the tensor if one cannot be written. The old file is then
/// unchanged.
pub fn write_safetensors_atomic(
    path: impl AsRef<Path>,
    tensors: &BTreeMap<String, Tensor>,
    metadata: Option<&HashMap<String, String>>,
) -> Result<(), FileError> {
    let path = path.as_ref();
    replace_file(path, |file| {
        write_safetensors(file, path, tensors, metadata)
    })
}

/// Writes the same bytes as [`write_safetensors_atomic`] to any writer; `path` is for messages.
///
/// # Errors
/// As [`write_safetensors_atomic`], except that what was written before the error stays.
pub fn write_safetensors(
    writer: &mut dyn Write,
    path: &Path,
    tensors: &BTreeMap<String, Tensor>,
    metadata: Option<&HashMap<String, String>>,
) -> Result<(), FileError> {
    let mut order: Vec<(&String, &Tensor)> = tensors.iter().collect();
    order.sort_by_key(|(_, tensor)| Reverse(tensor.dtype().size_in_bytes()));
    let metadata = metadata.map(|entries| json!(entries.iter().collect::<BTreeMap<_, _>>()));
    let mut header = Header::new(metadata);
    for (name, tensor) in &order {
        header.add(path, name, tensor.dtype().into(), tensor.dims())?;
    }
    let (header, _) = header.finish();
    writer
        .write_all(&header)
        .map_err(FileError::io(path, "write"))?;
    for (name, tensor) in order {
        write_tensor_data(writer, path, name, tensor)?;
    }
    Ok(())
}

/// Writes the elements of one tensor as the format stores them; `path` is for messages.
pub(crate) fn write_tensor_data(
    writer: &mut dyn Write,
    path: &Path,
    name: &str,
    tensor: &Tensor,
) -> Result<(), FileError> {
    write_data(writer, tensor).map_err(|error| match error {
        DataError::Io(source) => FileError::io(path, "write")(source),
        DataError::Candle(source) => FileError::Tensor {
            path: path.to_path_buf(),
            name: name.to_string(),
            source: Box::new(source),
        },
    })
}

/// The header of a file: names, dtypes, shapes and places of the tensors.
pub(crate) struct Header {
    /// serde_json's map is sorted by key; only `data_offsets` say where a tensor lies.
    entries: Map<String, Value>,
    /// Where the data end.
    end: u64,
}

impl Header {
    pub(crate) fn new(metadata: Option<Value>) -> Self {
        let metadata = metadata.map(|metadata| (METADATA.to_string(), metadata));
        Self {
            entries: metadata.into_iter().collect(),
            end: 0,
        }
    }

    /// Appends a tensor. Returns where its data begin, counted from the end of the header.
    pub(crate) fn add(
        &mut self,
        path: &Path,
        name: &str,
        dtype: Dtype,
        dims: &[usize],
    ) -> Result<u64, FileError> {
        if name == METADATA {
            let (path, name) = (path.to_path_buf(), name.to_string());
            return Err(FileError::ReservedName { path, name });
        }
        let start = self.end;
        self.end += (dims.iter().product::<usize>() * dtype.bitsize() / 8) as u64;
        let entry = json!({ "dtype": dtype, "shape": dims, "data_offsets": [start, self.end] });
        self.entries.insert(name.to_string(), entry);
        Ok(start)
    }

    /// The header with its length before it, padded with spaces to a multiple of 8 bytes so that the data begin aligned; and the length
    /// of the whole file.
    pub(crate) fn finish(self) -> (Vec<u8>, u64) {
        let mut json = Value::Object(self.entries).to_string().into_bytes();
        json.resize(json.len().next_multiple_of(8), b' ');
        let header = [&(json.len() as u64).to_le_bytes()[..], &json].concat();
        let length = header.len() as u64 + self.end;
        (header, length)
    }
}

#[derive(thiserror::Error, Debug)]
#[error(transparent)]
enum DataError {
    Io(#[from] io::Error),
    Candle(#[from] candle_core::Error),
}

/// Writes the elements in row-major order, little-endian.
fn write_data(writer: &mut dyn Write, tensor: &Tensor) -> Result<(), DataError> {
    // Neither copies a contiguous tensor on the CPU.
    let tensor = tensor.to_device(&Device::Cpu)?.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cpu(cpu), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
        return Err(candle_core::Error::msg("not in contiguous host memory").into());
    };
    match cpu {
        CpuStorage::U8(values) => writer.write_all(&values[start..end])?,
        CpuStorage::U32(values) => chunked(writer, &values[start..end], |x| x.to_le_bytes())?,
        CpuStorage::I16(values) => chunked(writer, &values[start..end], |x| x.to_le_bytes())?,
        CpuStorage::I32(values) => chunked(writer, &values[start..end], |x| x.to_le_bytes())?,
        CpuStorage::I64(values) => chunked(writer, &values[start..end], |x| x.to_le_bytes())?,
        CpuStorage::BF16(values) => chunked(writer, &values[start..end], |x| x.to_le_bytes())?,
        CpuStorage::F16(values) => chunked(writer, &values[start..end], |x| x.to_le_bytes())?,
        CpuStorage::F32(values) => chunked(writer, &values[start..end], |x| x.to_le_bytes())?,
        CpuStorage::F64(values) => chunked(writer, &values[start..end], |x| x.to_le_bytes())?,
        CpuStorage::F8E4M3(values) => chunked(writer, &values[start..end], |x| [x.to_bits()])?,
        CpuStorage::F8E8M0(values) => writer.write_all(&values[start..end])?,
        CpuStorage::F6E2M3(_) | CpuStorage::F6E3M2(_) | CpuStorage::F4(_) => {
            let dtype = tensor.dtype();
            return Err(
                candle_core::Error::UnsupportedDTypeForOp(dtype, "write safetensors").into(),
            );
        }
    }
    Ok(())
}

fn chunked<T, const N: usize>(
    writer: &mut dyn Write,
    values: &[T],
    bytes: impl Fn(&T) -> [u8; N],
) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(CHUNK.min(values.len()));
    for chunk in values.chunks(CHUNK) {
        buffer.clear();
        // Vector instructions copy arrays, not bytes one by one.
        buffer.extend(chunk.iter().map(&bytes));
        writer.write_all(buffer.as_flattened())?;
    }
    Ok(())
}
