//! What generation asks of a language model.

use crate::models::error::Result;
use crate::models::layers::KvCache;
use candle_core::{Device, Tensor};

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
