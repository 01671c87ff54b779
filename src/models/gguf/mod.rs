//! GGUF files as a source of weights in high precision.
//!
//! candle reads the file and dequantizes its tensors; here they get the names, the order of rows and the configuration that
//! transformers gives them, so that all else (our models, `quantize`, calibration) works as with any other model:
//!
//! - [`convert`] writes an ordinary directory: `config.json`, `tokenizer.json`, `model.safetensors` and the small files beside
//!   them;
//! - [`var_builder`] reads tensors straight from the file;
//! - [`GgufSource`] is what [`quantize`](crate::rewrite::quantize) takes.
//!
//! Read are the architectures llama (Mistral's models too), qwen2 and qwen3 in all types of tensors that candle knows, and
//! byte-level BPE tokenizers. Everything else is refused by name.

mod config;
mod convert;
mod error;
mod names;
mod scan;
mod source;
mod vocabulary;

pub use convert::convert;
pub use error::GgufError;
pub use source::{GgufSource, is_gguf};

use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use config::Dimensions;
use fp8_recipes::read::open_regular;
use names::{Architecture, Rows, Target};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
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
    path: PathBuf,
    file: Mutex<File>,
    content: Content,
    architecture: Architecture,
    /// `general.architecture`, which metadata entries begin with.
    prefix: String,
    dimensions: Dimensions,
    vocab_size: usize,
    /// From the names of transformers: the name in the file and the order of rows.
    tensors: BTreeMap<String, (String, Rows)>,
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
            fp8_recipes::FilesError::Read { source, .. } => io(source),
            error => GgufError::Unreadable(Box::new(error)),
        })?;
        scan::check(&path, &mut file)?;
        let content = std::io::Seek::rewind(&mut file)
            .map_err(io)
            .and_then(|()| {
                Content::read(&mut file).map_err(|error| GgufError::Broken {
                    path: path.clone(),
                    reason: error.to_string(),
                })
            })?;
        let key = "general.architecture";
        let name = content
            .metadata
            .get(key)
            .and_then(|name| name.to_string().ok());
        let prefix = name.cloned().unwrap_or_else(|| "unknown".to_string());
        let mut gguf = Self {
            architecture: Architecture::parse(&prefix, &path)?,
            path,
            file: Mutex::new(file),
            content,
            prefix,
            dimensions: Dimensions {
                layers: 0,
                hidden: 0,
                intermediate: 0,
                heads: 0,
                kv_heads: 0,
                head_dim: 0,
            },
            vocab_size: 0,
            tensors: BTreeMap::new(),
        };
        gguf.dimensions = gguf.read_dimensions()?;
        gguf.index()?;
        Ok(gguf)
    }

    /// Names and shapes of all tensors.
    fn index(&mut self) -> Result<(), GgufError> {
        let shape_of = |name: &str| match self.content.tensor_infos.get(name) {
            Some(info) => info.shape.dims().to_vec(),
            None => vec![],
        };
        let hidden = self.dimensions.hidden;
        let embedding = shape_of("token_embd.weight");
        let vocab_size = match embedding[..] {
            [vocab_size, width] if width == hidden => vocab_size,
            _ => {
                let expected = format!("[tokens, {hidden}]");
                return Err(self.shape_error("token_embd.weight", embedding, expected));
            }
        };
        let mut tensors = BTreeMap::new();
        for (name, info) in &self.content.tensor_infos {
            let Some(Target { name: target, rows }) =
                names::target(name, self.architecture, &self.path)?
            else {
                continue;
            };
            if let Some(expected) = self.expected_shape(&target, vocab_size)
                && info.shape.dims() != expected
            {
                let actual = info.shape.dims().to_vec();
                return Err(self.shape_error(name, actual, format!("{expected:?}")));
            }
            tensors.insert(target, (name.clone(), rows));
        }
        for layer in 0..self.dimensions.layers {
            for part in [
                "attn_norm",
                "attn_q",
                "attn_k",
                "attn_v",
                "attn_output",
                "ffn_norm",
                "ffn_gate",
                "ffn_up",
                "ffn_down",
            ] {
                let name = format!("blk.{layer}.{part}.weight");
                if !self.has(&name) {
                    return Err(self.shape_error(&name, vec![], "a weight".to_string()));
                }
            }
        }
        let beyond = format!("model.layers.{}.", self.dimensions.layers);
        if !self.has("output_norm.weight") {
            return Err(self.shape_error("output_norm.weight", vec![], format!("[{hidden}]")));
        }
        if let Some((name, _)) = tensors
            .iter()
            .find(|(name, _)| name.starts_with(&beyond))
            .map(|(_, file)| file)
        {
            return Err(GgufError::UnknownTensor {
                path: self.path.clone(),
                tensor: name.clone(),
                architecture: self.architecture.name(),
            });
        }
        self.vocab_size = vocab_size;
        self.tensors = tensors;
        Ok(())
    }

    /// By the name in transformers.
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

    fn shape_error(&self, tensor: &str, actual: Vec<usize>, expected: String) -> GgufError {
        GgufError::Shape {
            path: self.path.clone(),
            tensor: tensor.to_string(),
            actual,
            expected,
        }
    }

    fn tensor_error(&self, tensor: &str, source: candle_core::Error) -> GgufError {
        GgufError::Tensor {
            path: self.path.clone(),
            tensor: tensor.to_string(),
            source: Box::new(source),
        }
    }

    /// Whether the file has a tensor of this name of its own.
    fn has(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }

    /// A tensor by its name in the file, dequantized on the CPU.
    fn stored_f32(&self, name: &str) -> Result<Tensor, GgufError> {
        // Nothing is left half done where another thread panicked: each read begins with a seek.
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
        &self.path
    }

    /// The names of all tensors as transformers calls them, sorted. Tied embeddings have one name.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The shape of a tensor, by the name in transformers.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        let (stored, _) = self.tensors.get(name)?;
        Some(self.content.tensor_infos.get(stored)?.shape.dims())
    }

    /// A tensor by the name in transformers, dequantized, its rows in the order that transformers has.
    ///
    /// # Errors
    /// [`GgufError::Tensor`], also for a name that is not there.
    pub fn tensor(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor, GgufError> {
        let Some((stored, rows)) = self.tensors.get(name) else {
            let source = candle_core::Error::CannotFindTensor {
                path: name.to_string(),
            };
            return Err(self.tensor_error(name, source));
        };
        let tensor = self.stored_f32(stored)?;
        let is_query = name.contains("q_proj");
        let heads = match is_query {
            true => self.dimensions.heads,
            false => self.dimensions.kv_heads,
        };
        let ordered = match rows {
            Rows::AsStored => Ok(tensor),
            Rows::PerHead => names::unpermute(&tensor, heads),
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

/// Opens a GGUF file as a VarBuilder that dequantizes each tensor when a model asks for it.
///
/// # Errors
/// [`GgufError`] naming the file and what is wrong.
///
/// ```no_run
/// use candle_core::{DType, Device};
///
/// let vb = fp8::models::gguf::var_builder("model.gguf", DType::F32, &Device::Cpu)?;
/// let norm = vb.get(576, "model.norm.weight")?;
/// println!("{norm}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn var_builder(
    path: impl AsRef<Path>,
    dtype: DType,
    device: &Device,
) -> Result<VarBuilder<'static>, GgufError> {
    Ok(GgufFile::open(path)?.var_builder(dtype, device))
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
