//! GGUF files as a source of weights in high precision.
//!
//! candle reads the file and dequantizes its tensors. This module gives them the names, the order of rows and the configuration that
//! transformers uses, so that everything else (models, `quantize`, calibration) treats a GGUF file like any other model:
//!
//! - [`GgufFile::var_builder`] reads tensors straight from the file;
//! - [`GgufSource`] is what [`quantize`](crate::rewrite::quantize) takes, and [`dequantize`](crate::rewrite::dequantize), which writes an
//!   ordinary directory: `config.json`, tokenizer files and `model.safetensors`.
//!
//! [`write_gguf`](crate::models::gguf::write_gguf) goes the other way.
//!
//! It reads the architectures llama (which includes Mistral's models), qwen2 and qwen3, every tensor type that candle knows, and
//! byte-level BPE tokenizers. Anything else is an error that names it.

mod config;
mod file;
mod metadata;
pub(crate) mod names;
pub(crate) mod pre;
mod rope;
mod scan;
mod source;
mod vocabulary;

pub use crate::models::error::GgufError;
pub use file::GgufFile;
pub use source::{GgufSource, is_gguf};
