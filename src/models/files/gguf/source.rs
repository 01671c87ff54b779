//! A GGUF file as a source for `quantize` and `dequantize`.

use super::GgufError;
use super::file::GgufFile;
use super::scan::MAGIC;
use crate::rewrite::Source;
use candle_core::{DType, Device, Tensor};
use fp8_files::{Error, Result};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// A model of a GGUF file with its configuration, for [`quantize`](crate::rewrite::quantize) and
/// [`dequantize`](crate::rewrite::dequantize). They read one dequantized tensor at a time and write the tokenizer beside the weights.
///
/// ```no_run
/// use fp8::models::gguf::{GgufFile, GgufSource};
/// use fp8::rewrite::{self, QuantizeOptions, Scheme};
///
/// let source = GgufSource::new(GgufFile::open("model.gguf")?)?;
/// let options = QuantizeOptions::new(Scheme::ChannelToken);
/// rewrite::quantize(&source, "model-fp8", &options, &mut rewrite::quiet)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct GgufSource {
    file: GgufFile,
    config: Value,
}

impl GgufSource {
    /// Takes an open file.
    ///
    /// # Errors
    /// [`GgufError`] if no configuration can be made of its metadata.
    pub fn new(file: GgufFile) -> std::result::Result<Self, GgufError> {
        let config = file.config()?;
        Ok(Self { file, config })
    }
}

impl Source for GgufSource {
    fn names(&self) -> Vec<String> {
        self.file.names().map(String::from).collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.file.shape(name).map(<[usize]>::to_vec)
    }

    /// None: tensors that are not quantized become f32, which holds every block type exactly.
    fn dtype(&self, _: &str) -> Option<DType> {
        None
    }

    fn value(&self, name: &str, dtype: DType) -> Result<Tensor> {
        let tensor = self.file.tensor(name, dtype, &Device::Cpu);
        tensor.map_err(wrapped)
    }

    fn config(&self) -> Option<&Value> {
        Some(&self.config)
    }

    fn directory(&self) -> Option<PathBuf> {
        None
    }

    fn files(&self) -> Result<BTreeMap<String, Value>> {
        let mut generation = Map::new();
        for key in ["bos_token_id", "eos_token_id", "pad_token_id"] {
            if let Some(id) = self.config.get(key) {
                generation.insert(key.to_string(), id.clone());
            }
        }
        let files = [
            ("generation_config.json", generation.into()),
            (
                "tokenizer.json",
                self.file.tokenizer_json().map_err(wrapped)?,
            ),
            (
                "tokenizer_config.json",
                self.file.tokenizer_config().map_err(wrapped)?,
            ),
        ];
        Ok(files.map(|(name, value)| (name.to_string(), value)).into())
    }
}

fn wrapped(error: GgufError) -> Error {
    candle_core::Error::wrap(error).into()
}

/// Whether a path names a GGUF file: it ends in `.gguf` and no directory has that name, or it is a file that begins as a GGUF file does.
///
/// ```
/// use fp8::models::gguf::is_gguf;
/// assert!(is_gguf("SmolLM2.Q8_0.GGUF"));
/// assert!(!is_gguf("model.safetensors"));
/// ```
pub fn is_gguf(path: impl AsRef<Path>) -> bool {
    let path = path.as_ref();
    let extension = path.extension();
    let named = extension.is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => false,
        // Only a regular file can be opened without waiting for another program.
        Ok(found) if found.is_file() && !named => begins_as_gguf(path),
        _ => named,
    }
}

fn begins_as_gguf(path: &Path) -> bool {
    let mut magic = [0; MAGIC.len()];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    read.is_ok() && magic == MAGIC
}
