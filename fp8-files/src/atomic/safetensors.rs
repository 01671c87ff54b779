//! Named tensors into the safetensors format, streamed and in a fixed order.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::path::Path;

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use safetensors::Dtype;
use serde_json::{Map, Value, json};

use super::{FileError, replace_file};

/// Elements converted to bytes at a time.
const CHUNK: usize = 1 << 14;
/// Key of the metadata in the header.
const METADATA: &str = "__metadata__";

/// Replaces the file at `path` by a safetensors file of these tensors, all or nothing.
///
/// The same tensors and metadata always give the same bytes: tensors stand in order of falling
/// element size, then of name (so every tensor is aligned to its element), metadata in order of
/// key. Tensors are written straight from their memory in small pieces; only one that is strided or
/// on an accelerator is copied, one at a time.
///
/// # Errors
/// [`FileError`] naming the path, and the tensor where one is at fault. The old file is then
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

/// Writes the same bytes as [`write_safetensors_atomic`] to any writer; `path` only serves
/// messages.
///
/// # Errors
/// As [`write_safetensors_atomic`]; what was written until then stays written.
pub fn write_safetensors(
    writer: &mut dyn Write,
    path: &Path,
    tensors: &BTreeMap<String, Tensor>,
    metadata: Option<&HashMap<String, String>>,
) -> Result<(), FileError> {
    let mut order: Vec<(&String, &Tensor)> = tensors.iter().collect();
    order.sort_by_key(|(_, tensor)| std::cmp::Reverse(tensor.dtype().size_in_bytes()));

    let header = header(path, &order, metadata)?;
    let write = |writer: &mut dyn Write, bytes: &[u8]| {
        writer
            .write_all(bytes)
            .map_err(FileError::io(path, "write"))
    };
    write(writer, &(header.len() as u64).to_le_bytes())?;
    write(writer, &header)?;
    for (name, tensor) in order {
        write_tensor_data(writer, path, name, tensor)?;
    }
    Ok(())
}

/// The elements of one tensor as the format has them; `path` only serves messages.
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

/// The JSON header, padded with spaces to a multiple of 8 bytes so that the data begins aligned.
fn header(
    path: &Path,
    order: &[(&String, &Tensor)],
    metadata: Option<&HashMap<String, String>>,
) -> Result<Vec<u8>, FileError> {
    // serde_json's map is sorted by key; only `data_offsets` say where a tensor lies.
    let mut entries = Map::new();
    if let Some(metadata) = metadata {
        let sorted: BTreeMap<_, _> = metadata.iter().collect();
        entries.insert(METADATA.to_string(), json!(sorted));
    }
    let mut offset = 0usize;
    for (name, tensor) in order {
        if name.as_str() == METADATA {
            let (path, name) = (path.to_path_buf(), METADATA.to_string());
            return Err(FileError::ReservedName { path, name });
        }
        let end = offset + tensor.elem_count() * tensor.dtype().size_in_bytes();
        let dtype: Dtype = tensor.dtype().into();
        let entry =
            json!({ "dtype": dtype, "shape": tensor.dims(), "data_offsets": [offset, end] });
        entries.insert((*name).clone(), entry);
        offset = end;
    }
    let mut header = Value::Object(entries).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok(header)
}

enum DataError {
    Io(io::Error),
    Candle(candle_core::Error),
}

impl From<io::Error> for DataError {
    fn from(error: io::Error) -> Self {
        DataError::Io(error)
    }
}

impl From<candle_core::Error> for DataError {
    fn from(error: candle_core::Error) -> Self {
        DataError::Candle(error)
    }
}

/// The elements in row-major order, little-endian.
fn write_data(writer: &mut dyn Write, tensor: &Tensor) -> Result<(), DataError> {
    // Both are free of copies for a contiguous tensor on the CPU.
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
            return Err(unsupported(tensor.dtype()).into());
        }
    }
    Ok(())
}

fn chunked<T, const N: usize>(
    writer: &mut dyn Write,
    values: &[T],
    bytes: impl Fn(&T) -> [u8; N],
) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(N * CHUNK.min(values.len()));
    for chunk in values.chunks(CHUNK) {
        buffer.clear();
        buffer.extend(chunk.iter().flat_map(&bytes));
        writer.write_all(&buffer)?;
    }
    Ok(())
}

fn unsupported(dtype: DType) -> candle_core::Error {
    candle_core::Error::UnsupportedDTypeForOp(dtype, "write safetensors")
}
