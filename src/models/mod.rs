//! Models that run FP8 checkpoints and can be trained: the Llama family, mixtures of experts, latent attention, BERT encoders.
//!
//! | item | what it is |
//! |---|---|
//! | [`open()`] | opens the model in a directory, in any family of FP8 files |
//! | [`Llama`] | Llama 2 and 3, Mistral, Qwen2, Qwen3, Phi-3, SmolLM; Mixtral and Qwen3-MoE; DeepSeek-V2 and V3, Mistral 4 |
//! | [`Bert`] | encoders such as MiniLM, with mean pooling |
//! | [`KvCache`] | keys and values of the tokens seen so far, in the model's dtype or in FP8 |
//! | [`AdapterConfig`] | adapters of low rank (LoRA), which PEFT reads and writes: [`Model::add_adapter`] |
//! | [`CausalLm`] | a language model as generation uses it |
//! | [`generate()`], [`generate_text`] | continue prompts, many at once, token by token |
//! | [`find_codes`] | chooses FP8 codes and scales that keep the errors of layers on samples small |
//! | [`Tokenizer`] | text to tokens and back, chats |
//! | [`gguf`] | GGUF files as models in high precision, and as output |
//!
//! They are built on [`crate::nn`], so `prepare_fp8`, guards, calibration and `save_calibrated` work on them as on your own
//! models.

mod adapters;
mod error;
mod families;
mod files;
mod generation;
mod layers;
mod open;
mod search;
mod text;
mod to_gguf;
mod unread;

pub use error::{Error, Result, TextError};
pub use families::*;
#[cfg(feature = "hub")]
pub use files::{hub, remote};
pub use fp8_files::adapter::{AdapterConfig, AdapterError, Targets};
pub use generation::*;
pub(crate) use generation::{Ends, Row, check_prompt, checked};
pub use layers::{KvCache, KvScales, RopeConfig, RopeScaling};
pub use open::{
    ModelOptions, config_of, of_checkpoint, of_checkpoint_with_unread, open, open_config,
};
pub use search::{FoundCodes, OutputError, find_codes};
pub use text::{ChatMessage, Tokenizer};

/// GGUF files: read as models in high precision, and written for llama.cpp.
pub mod gguf {
    pub use super::files::gguf::{GgufError, GgufFile, GgufSource, is_gguf};
    pub use super::to_gguf::{GgufOptions, GgufReport, GgufType, write_gguf};
}
