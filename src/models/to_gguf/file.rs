//! The layout of a GGUF file: a header with entries and tensors, then the tensors' bytes, each aligned.
//!
//! candle's writer needs all tensors in memory.

use super::encode;
use super::options::GgufType;
use super::plan::{Content, Planned};
use crate::models::error::{Error, Result};
use crate::rewrite::{OnProgress, Progress, Source};
use candle_core::quantized::gguf_file::{Value, ValueType};
use fp8_files::atomic::{FileError, replace_file};
use std::path::Path;

const MAGIC: &[u8; 4] = b"GGUF";
const VERSION: u32 = 3;
/// The alignment of tensors unless the file states another.
const ALIGNMENT: u64 = 32;

/// An error inside an atomic write.
enum Failure {
    File(FileError),
    Other(Error),
}

impl From<FileError> for Failure {
    fn from(error: FileError) -> Self {
        Self::File(error)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

/// Writes the file; one tensor is in memory at a time.
pub(super) fn write(
    path: &Path,
    entries: &[(String, Value)],
    tensors: &[Planned],
    source: &dyn Source,
    on_progress: &mut OnProgress<'_>,
) -> Result<()> {
    let header = header(entries, tensors)?;
    let total = tensors.iter().map(Planned::bytes).sum();
    let written = replace_file(path, |writer| -> std::result::Result<(), Failure> {
        let io = FileError::io(path, "write");
        writer.write_all(&header).map_err(&io)?;
        let mut done = 0;
        for tensor in tensors {
            let name = match &tensor.content {
                Content::Parts { names, .. } => &names[0],
                Content::Values(_) => &tensor.name,
            };
            Progress::report(name, done, total, on_progress).map_err(Error::from)?;
            encode::write(writer, path, tensor, source)?;
            let bytes = tensor.bytes();
            let padding = vec![0; (bytes.next_multiple_of(ALIGNMENT) - bytes) as usize];
            writer.write_all(&padding).map_err(&io)?;
            done += bytes;
        }
        Progress::report("", done, total, on_progress).map_err(Error::from)?;
        Ok(())
    });
    written.map_err(|failure| match failure {
        Failure::File(error) => fp8_files::Error::from(error).into(),
        Failure::Other(error) => error,
    })
}

fn header(entries: &[(String, Value)], tensors: &[Planned]) -> Result<Vec<u8>> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((entries.len() as u64).to_le_bytes());
    for (key, value) in entries {
        text(&mut bytes, key);
        bytes.extend(kind(value.value_type()).to_le_bytes());
        put(&mut bytes, value)?;
    }
    let mut offset = 0u64;
    for tensor in tensors {
        text(&mut bytes, &tensor.name);
        bytes.extend((tensor.dims.len() as u32).to_le_bytes());
        // Innermost first.
        for dim in tensor.dims.iter().rev() {
            bytes.extend((*dim as u64).to_le_bytes());
        }
        let stored: u32 = match tensor.stored {
            GgufType::F32 => 0,
            GgufType::F16 => 1,
            GgufType::Q8_0 => 8,
            GgufType::BF16 => 30,
        };
        bytes.extend(stored.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        offset += tensor.bytes().next_multiple_of(ALIGNMENT);
    }
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT as usize), 0);
    Ok(bytes)
}

fn text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

/// The number of a type.
fn kind(kind: ValueType) -> u32 {
    match kind {
        ValueType::U8 => 0,
        ValueType::I8 => 1,
        ValueType::U16 => 2,
        ValueType::I16 => 3,
        ValueType::U32 => 4,
        ValueType::I32 => 5,
        ValueType::F32 => 6,
        ValueType::Bool => 7,
        ValueType::String => 8,
        ValueType::Array => 9,
        ValueType::U64 => 10,
        ValueType::I64 => 11,
        ValueType::F64 => 12,
    }
}

/// The bytes of a value, of the types that entries here have.
fn put(bytes: &mut Vec<u8>, value: &Value) -> Result<()> {
    match value {
        Value::U32(x) => bytes.extend(x.to_le_bytes()),
        Value::I32(x) => bytes.extend(x.to_le_bytes()),
        Value::F32(x) => bytes.extend(x.to_le_bytes()),
        Value::Bool(x) => bytes.push(u8::from(*x)),
        Value::String(x) => text(bytes, x),
        Value::Array(values) => {
            // An empty array has no type of its own.
            let first = values.first().map_or(ValueType::String, Value::value_type);
            bytes.extend(kind(first).to_le_bytes());
            bytes.extend((values.len() as u64).to_le_bytes());
            for value in values {
                put(bytes, value)?;
            }
        }
        other => {
            let error = format!("an entry of type {:?} is not written", other.value_type());
            return Err(candle_core::Error::msg(error).into());
        }
    }
    Ok(())
}
