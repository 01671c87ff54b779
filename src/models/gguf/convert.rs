//! A GGUF file as an ordinary directory of a model.

use super::{GgufError, GgufFile};
use candle_core::{DType, Device, Tensor};
use fp8_recipes::atomic::write_atomic;
use serde_json::{Map, Value, json};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Elements converted to bytes at a time.
const CHUNK: usize = 1 << 14;

/// Writes the model of a GGUF file to the directory `out`: `config.json`, `generation_config.json`, `tokenizer.json`,
/// `tokenizer_config.json` and `model.safetensors` with values in `dtype` (f32, bf16 or f16), one tensor in memory at a time.
/// The directory becomes visible when it is whole.
///
/// # Errors
/// [`GgufError`] naming the file and what is wrong. `out` must not exist or be an empty directory; on an error nothing is
/// left of it.
///
/// ```no_run
/// use candle_core::DType;
///
/// fp8::models::gguf::convert("model.gguf", "model", DType::BF16)?;
/// # Ok::<(), fp8::models::gguf::GgufError>(())
/// ```
pub fn convert(
    path: impl AsRef<Path>,
    out: impl AsRef<Path>,
    dtype: DType,
) -> Result<(), GgufError> {
    let (file, out) = (GgufFile::open(path)?, out.as_ref());
    if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
        let error = candle_core::Error::UnsupportedDTypeForOp(dtype, "gguf::convert");
        return Err(file.tensor_error("token_embd.weight", error));
    }
    let mut config = file.config()?;
    config["torch_dtype"] = json!(match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    });
    let stage = Stage::new(out)?;
    let mut generation = Map::new();
    for key in ["bos_token_id", "eos_token_id", "pad_token_id"] {
        if let Some(id) = config.get(key) {
            generation.insert(key.to_string(), id.clone());
        }
    }
    for (name, json) in [
        ("config.json", &config),
        ("generation_config.json", &Value::Object(generation)),
        ("tokenizer.json", &file.tokenizer_json()?),
        ("tokenizer_config.json", &file.tokenizer_config()?),
    ] {
        write_atomic(stage.path.join(name), |writer| {
            serde_json::to_writer_pretty(&mut *writer, json)?;
            writer.write_all(b"\n")
        })?;
    }
    write_tensors(&file, &stage.path.join("model.safetensors"), dtype)?;
    stage.finish(out)
}

/// A directory in the making, beside the one that it becomes.
struct Stage {
    path: PathBuf,
}

impl Stage {
    fn new(out: &Path) -> Result<Self, GgufError> {
        match fs::read_dir(out).map(Iterator::count) {
            Ok(0) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) if source.kind() != io::ErrorKind::NotADirectory => {
                let path = out.to_path_buf();
                return Err(GgufError::Io { path, source });
            }
            _ => {
                let path = out.to_path_buf();
                return Err(GgufError::NotEmpty { path });
            }
        }
        let mut name = out.file_name().unwrap_or_default().to_os_string();
        name.push(format!(".tmp-{}", std::process::id()));
        let path = out.with_file_name(name);
        // What an earlier process of the same number left.
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).map_err(|source| GgufError::Io {
            path: path.clone(),
            source,
        })?;
        Ok(Self { path })
    }

    fn finish(self, out: &Path) -> Result<(), GgufError> {
        // An empty directory gives way to the new one; on some systems only when it is gone.
        let _ = fs::remove_dir(out);
        fs::rename(&self.path, out).map_err(|source| GgufError::Io {
            path: out.to_path_buf(),
            source,
        })
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // After `finish` there is nothing left.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// All tensors, in order of name, each read when its turn comes.
fn write_tensors(file: &GgufFile, path: &Path, dtype: DType) -> Result<(), GgufError> {
    let mut header = Map::new();
    header.insert("__metadata__".to_string(), json!({ "format": "pt" }));
    let mut offset = 0;
    let stored: safetensors::Dtype = dtype.into();
    for name in file.names() {
        let shape = file.shape(name).unwrap_or_default();
        let end = offset + shape.iter().product::<usize>() * dtype.size_in_bytes();
        let entry = json!({ "dtype": stored, "shape": shape, "data_offsets": [offset, end] });
        header.insert(name.to_string(), entry);
        offset = end;
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');

    let mut fault = None;
    let written = write_atomic(path, |writer| {
        writer.write_all(&(header.len() as u64).to_le_bytes())?;
        writer.write_all(&header)?;
        for name in file.names() {
            let tensor = file.tensor(name, dtype, &Device::Cpu);
            let tensor = tensor.map_err(|error| {
                let text = error.to_string();
                fault = Some(error);
                io::Error::other(text)
            })?;
            write_data(writer, &tensor)?;
        }
        Ok(())
    });
    match (written, fault) {
        (_, Some(error)) => Err(error),
        (Err(error), None) => Err(error.into()),
        (Ok(()), None) => Ok(()),
    }
}

/// The elements in row-major order, little-endian.
fn write_data(writer: &mut dyn Write, tensor: &Tensor) -> io::Result<()> {
    let flat = tensor.flatten_all().map_err(io::Error::other)?;
    let count = flat.elem_count();
    for start in (0..count).step_by(CHUNK) {
        let part = flat.narrow(0, start, CHUNK.min(count - start));
        let bytes = part.and_then(|part| match part.dtype() {
            DType::BF16 => Ok(bytes(&part.to_vec1::<half::bf16>()?, |x| x.to_le_bytes())),
            DType::F16 => Ok(bytes(&part.to_vec1::<half::f16>()?, |x| x.to_le_bytes())),
            _ => Ok(bytes(&part.to_vec1::<f32>()?, |x| x.to_le_bytes())),
        });
        writer.write_all(&bytes.map_err(io::Error::other)?)?;
    }
    Ok(())
}

fn bytes<T, const N: usize>(values: &[T], to: impl Fn(&T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(to).collect()
}
