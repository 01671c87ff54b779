//! Models that run FP8 checkpoints, and train: the Llama family, mixtures of experts, BERT encoders.
//!
//! | item | what it is |
//! |---|---|
//! | [`open()`] | a directory to the model in it, whatever family its FP8 is of |
//! | [`Llama`] | Llama 2 and 3, Mistral, Qwen2, Qwen3, Phi-3, SmolLM; Mixtral and Qwen3-MoE |
//! | [`Bert`] | encoders such as MiniLM, with mean pooling |
//! | [`KvCache`] | keys and values of what was seen, in the model's dtype or in FP8 |
//! | [`CausalLm`] | what generation asks of a language model |
//! | [`generate()`], [`generate_text`] | what follows prompts, for many at once, token by token |
//! | [`Tokenizer`] | text to tokens and back, chats |
//! | [`gguf`] | GGUF files as models in high precision |
//!
//! They are built on [`crate::nn`], so `prepare_fp8`, guards, calibration and `save_calibrated` work on them as on a model of
//! your own.

mod bert;
mod caught;
mod chat;
mod entries;
mod error;
mod generate;
pub mod gguf;
#[cfg(feature = "hub")]
pub mod hub;
mod kv_cache;
mod layer_cache;
mod llama;
mod open;
mod options;
mod pool;
mod rope;
mod sampling;
mod template;
mod text;
mod text_error;
mod tokenizer;

pub use bert::{Bert, BertActivation, BertConfig, Pooling};
pub use chat::ChatMessage;
pub use error::{Error, Result};
pub use generate::{FinishReason, Output, Stop, Token, generate};
pub use kv_cache::{KvCache, KvScales};
pub use llama::{Llama, LlamaConfig, MoeConfig, MoeNames};
pub use open::{Config, Model, ModelOptions, config_of, of_checkpoint, open};
pub use options::GenerationOptions;
pub use rope::{RopeConfig, RopeScaling};
pub use text::{TextOutput, TextPiece, TextStream, generate_text};
pub use text_error::TextError;
pub use tokenizer::Tokenizer;

use candle_core::{DType, Device, Tensor};

/// A language model that goes on from what it has seen. For inference: logits have no gradient; [`Llama::forward`] has one.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// # use fp8::models::{CausalLm, Llama, LlamaConfig};
/// # let json = serde_json::json!({ "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16,
/// #     "num_hidden_layers": 1, "num_attention_heads": 2 });
/// # let config = LlamaConfig::parse("config.json", &json)?;
/// # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// # let model = Llama::new(&config, vb)?;
/// // The likeliest token after `ids`, of any model.
/// fn next(model: &dyn CausalLm, ids: &[u32]) -> fp8::models::Result<u32> {
///     let ids = Tensor::new(ids, model.device())?.unsqueeze(0)?;
///     let mut cache = model.new_cache(1, ids.elem_count())?;
///     let logits = model.last_logits(&ids, &mut cache)?;
///     Ok(logits.argmax(1)?.to_vec1()?[0])
/// }
/// assert!(next(&model, &[1, 5, 9])? < 32);
/// # Ok::<(), fp8::models::Error>(())
/// ```
pub trait CausalLm {
    /// Logits of `ids`, u32 `[batch, tokens]`, which follow the tokens in the cache: `[batch, tokens, vocab_size]`. The tokens
    /// are then in the cache.
    ///
    /// # Errors
    /// If an id is not in the vocabulary, the cache is another model's or has no room; the cache is as before then.
    fn forward_cached(&self, ids: &Tensor, cache: &mut KvCache) -> Result<Tensor>;

    /// [`CausalLm::forward_cached`] with the logits of the last token only, `[batch, vocab_size]`.
    ///
    /// # Errors
    /// As [`CausalLm::forward_cached`], and if there is no token.
    fn last_logits(&self, ids: &Tensor, cache: &mut KvCache) -> Result<Tensor>;

    /// An empty cache for `batch` sequences of up to `capacity` tokens, in the model's dtype.
    ///
    /// # Errors
    /// If there is no memory for it.
    fn new_cache(&self, batch: usize, capacity: usize) -> Result<KvCache>;

    /// Tokens in the vocabulary.
    fn vocab_size(&self) -> usize;

    /// Where the model computes.
    fn device(&self) -> &Device;

    /// Whether sequences of one cache may have seen different numbers of tokens. [`generate()`] then runs prompts of all lengths
    /// together; otherwise, and by default, one length after the other.
    fn takes_unequal_rows(&self) -> bool {
        false
    }

    /// Tokens of a sequence that the model has positions for; None, the default: it does not say.
    fn max_positions(&self) -> Option<usize> {
        None
    }

    /// Tokens that end a text, by the model's own configuration; none by default.
    fn eos_tokens(&self) -> &[u32] {
        &[]
    }
}

/// Checks that `ids` are `[batch, tokens]` of integers below `vocab_size`; as u32.
fn token_rows(ids: &Tensor, vocab_size: usize) -> Result<Tensor> {
    let wrong = |reason: String| Error::TokenIds { reason };
    if ids.rank() != 2 {
        let reason = format!("their shape is {:?}, expected [batch, tokens]", ids.dims());
        return Err(wrong(reason));
    }
    if !ids.dtype().is_int() {
        let reason = format!("they are {}, expected integers", ids.dtype().as_str());
        return Err(wrong(reason));
    }
    let values = ids.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>()?;
    if let Some(id) = values
        .iter()
        .find(|id| !(0..vocab_size as i64).contains(id))
    {
        let reason = format!("{id} is not in the vocabulary of {vocab_size}");
        return Err(wrong(reason));
    }
    Ok(ids.to_dtype(DType::U32)?)
}
