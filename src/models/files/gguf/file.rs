//! An open GGUF file and its tensors.

use super::GgufError;
use super::metadata::{Dimensions, Metadata};
use super::names::{self, Architecture};
use super::scan;
use crate::read::open_regular;
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Cursor, Read, Seek};
use std::path::Path;
use std::sync::Mutex;

/// An open GGUF file whose header has been checked.
///
/// ```no_run
/// use fp8::models::gguf::GgufFile;
///
/// let file = GgufFile::open("model.gguf")?;
/// for name in file.names() {
///     println!("{name}: {:?}", file.shape(name));
/// }
/// # Ok::<(), fp8::models::gguf::GgufError>(())
/// ```
#[derive(Debug)]
pub struct GgufFile {
    file: Mutex<File>,
    content: Content,
    pub(super) metadata: Metadata,
    pub(super) architecture: Architecture,
    pub(super) dimensions: Dimensions,
    pub(super) vocab_size: usize,
    /// The names in the file, by the names of transformers.
    tensors: BTreeMap<String, String>,
}

impl GgufFile {
    /// Opens a file and checks that everything in it is known: architecture, names, shapes and types of all tensors.
    ///
    /// # Errors
    /// [`GgufError`] naming the file and what is wrong.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        let path = path.as_ref().to_path_buf();
        let io = |source| GgufError::Io {
            path: path.clone(),
            source,
        };
        let mut file = open_regular(&path).map_err(|error| match error {
            crate::FilesError::Read { source, .. } => io(source),
            error => GgufError::Unreadable(Box::new(error)),
        })?;
        let length = scan::check(&path, &mut file)?;
        file.rewind().map_err(io)?;
        // As a whole: candle asks for each of some hundred thousand texts by itself, and for its position after each.
        let mut header = vec![];
        (&file).take(length).read_to_end(&mut header).map_err(io)?;
        let content = Content::read(&mut Cursor::new(header));
        let mut content = content.map_err(|error| GgufError::Broken {
            path: path.clone(),
            reason: error.to_string(),
        })?;
        let name = content.metadata.get("general.architecture");
        let name = name.and_then(|name| name.to_string().ok()).cloned();
        let metadata = Metadata {
            path,
            prefix: name.unwrap_or_else(|| "unknown".to_string()),
            entries: std::mem::take(&mut content.metadata),
        };
        let mut gguf = Self {
            architecture: Architecture::parse(&metadata.prefix, &metadata.path)?,
            dimensions: metadata.dimensions()?,
            file: Mutex::new(file),
            content,
            metadata,
            vocab_size: 0,
            tensors: BTreeMap::new(),
        };
        gguf.index()?;
        Ok(gguf)
    }

    /// Checks the names and shapes of all tensors, and notes them under their names in transformers.
    fn index(&mut self) -> Result<(), GgufError> {
        let hidden = self.dimensions.hidden;
        let vocab_size = match *self.stored_shape("token_embd.weight") {
            [vocab_size, width] if width == hidden => vocab_size,
            _ => return Err(self.shape_error("token_embd.weight", format!("[tokens, {hidden}]"))),
        };
        let mut tensors = BTreeMap::new();
        for (name, info) in &self.content.tensor_infos {
            let Some(target) = names::target(name, self.architecture, self.path())? else {
                continue;
            };
            if let Some(expected) = self.expected_shape(&target, vocab_size)
                && info.shape.dims() != expected
            {
                return Err(self.shape_error(name, format!("{expected:?}")));
            }
            tensors.insert(target, name.clone());
        }
        for layer in 0..self.dimensions.layers {
            for part in names::LAYER_PARTS {
                let name = format!("blk.{layer}.{part}.weight");
                if !self.has(&name) {
                    return Err(self.shape_error(&name, "a weight".to_string()));
                }
            }
        }
        if !self.has("output_norm.weight") {
            return Err(self.shape_error("output_norm.weight", format!("[{hidden}]")));
        }
        let beyond = format!("model.layers.{}.", self.dimensions.layers);
        let mut stored = tensors.iter();
        if let Some((_, name)) = stored.find(|(name, _)| name.starts_with(&beyond)) {
            return Err(GgufError::UnknownTensor {
                path: self.path().to_path_buf(),
                tensor: name.clone(),
                architecture: self.architecture.name(),
            });
        }
        self.vocab_size = vocab_size;
        self.tensors = tensors;
        Ok(())
    }

    /// The shape of a tensor by its name in the file; empty if there is none.
    fn stored_shape(&self, name: &str) -> &[usize] {
        let info = self.content.tensor_infos.get(name);
        info.map_or(&[], |info| info.shape.dims())
    }

    /// The shape that the tensor of this name in transformers must have.
    fn expected_shape(&self, name: &str, vocab_size: usize) -> Option<Vec<usize>> {
        let Dimensions {
            hidden,
            intermediate,
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.dimensions;
        let (module, kind) = name.rsplit_once('.')?;
        let (out, input) = match module.rsplit('.').next()? {
            "embed_tokens" | "lm_head" => (vocab_size, hidden),
            "q_proj" => (heads * head_dim, hidden),
            "k_proj" | "v_proj" => (kv_heads * head_dim, hidden),
            "o_proj" => (hidden, heads * head_dim),
            "gate_proj" | "up_proj" => (intermediate, hidden),
            "down_proj" => (hidden, intermediate),
            "q_norm" | "k_norm" => return Some(vec![head_dim]),
            _ => return Some(vec![hidden]),
        };
        Some(match kind {
            "bias" => vec![out],
            _ => vec![out, input],
        })
    }

    fn shape_error(&self, tensor: &str, expected: String) -> GgufError {
        GgufError::Shape {
            path: self.path().to_path_buf(),
            tensor: tensor.to_string(),
            actual: self.stored_shape(tensor).to_vec(),
            expected,
        }
    }

    pub(super) fn broken(&self, reason: String) -> GgufError {
        let path = self.path().to_path_buf();
        GgufError::Broken { path, reason }
    }

    pub(super) fn tensor_error(&self, tensor: &str, source: candle_core::Error) -> GgufError {
        GgufError::Tensor {
            path: self.path().to_path_buf(),
            tensor: tensor.to_string(),
            source: Box::new(source),
        }
    }

    /// Whether the file has a tensor of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }

    /// A tensor by its name in the file, dequantized on the CPU.
    pub(super) fn stored_f32(&self, name: &str) -> Result<Tensor, GgufError> {
        // The file is usable after a panic of another thread: each read begins with a seek.
        let mut file = self
            .file
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        self.content
            .tensor(&mut *file, name, &Device::Cpu)
            .and_then(|tensor| tensor.dequantize(&Device::Cpu))
            .map_err(|error| self.tensor_error(name, error))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.metadata.path
    }

    /// The names of all tensors in transformers, sorted. Tied embeddings have one name.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The shape of a tensor, by the name in transformers.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|name| self.stored_shape(name))
    }

    /// A tensor by the name in transformers, dequantized, its rows in transformers' order.
    ///
    /// # Errors
    /// [`GgufError::Tensor`], also for a name that is not there.
    pub fn tensor(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor, GgufError> {
        let Some(stored) = self.tensors.get(name) else {
            let path = name.to_string();
            let source = candle_core::Error::CannotFindTensor { path };
            return Err(self.tensor_error(name, source));
        };
        let tensor = self.stored_f32(stored)?;
        let heads = match name.contains("q_proj") {
            true => self.dimensions.heads,
            false => self.dimensions.kv_heads,
        };
        let ordered = match self.architecture.permutes(name) {
            true => names::unpermute(&tensor, heads),
            false => Ok(tensor),
        };
        ordered
            .and_then(|tensor| tensor.to_dtype(dtype)?.to_device(device))
            .map_err(|error| self.tensor_error(stored, error))
    }

    /// A VarBuilder over the tensors, by their names in transformers.
    pub fn var_builder(self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self), dtype, device.clone())
    }
}

impl SimpleBackend for GgufFile {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let tensor = self.get_unchecked(name, dtype, device)?;
        if tensor.shape() != &shape {
            return Err(candle_core::Error::UnexpectedShape {
                msg: format!("shape mismatch for {name}"),
                expected: shape,
                got: tensor.shape().clone(),
            });
        }
        Ok(tensor)
    }

    fn get_unchecked(
        &self,
        name: &str,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        self.tensor(name, dtype, device)
            .map_err(|error| match error {
                GgufError::Tensor { source, .. } => *source,
                error => candle_core::Error::wrap(error),
            })
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }
}
