//! A language model as generation uses it.

use crate::models::error::Result;
use crate::models::layers::KvCache;
use candle_core::{Device, Tensor};

/// A language model with a cache of the tokens it has seen. For inference: logits carry no gradient; those of
/// [`Llama::forward`](crate::models::Llama::forward) do.
pub trait CausalLm {
    /// Logits of `ids`, u32 `[batch, tokens]`, which follow the tokens in the cache: `[batch, tokens, vocab_size]`. Adds the tokens to
    /// the cache.
    ///
    /// # Errors
    /// If an id is not in the vocabulary, or the cache belongs to another model or has no room. The cache is then unchanged.
    fn forward_cached(&self, ids: &Tensor, cache: &mut KvCache) -> Result<Tensor>;

    /// [`CausalLm::forward_cached`] with the logits of the last token only, `[batch, vocab_size]`.
    ///
    /// # Errors
    /// As [`CausalLm::forward_cached`], and if `ids` has no token.
    fn last_logits(&self, ids: &Tensor, cache: &mut KvCache) -> Result<Tensor>;

    /// An empty cache for `batch` sequences of up to `capacity` tokens, in the model's dtype.
    ///
    /// # Errors
    /// If there is no memory for it.
    fn new_cache(&self, batch: usize, capacity: usize) -> Result<KvCache>;

    /// Tokens in the vocabulary.
    fn vocab_size(&self) -> usize;

    /// The device that the model computes on.
    fn device(&self) -> &Device;

    /// Whether sequences of one cache may have seen different numbers of tokens. If so, [`generate()`](crate::models::generate()) runs prompts of all
    /// lengths together; otherwise, and by default, one length after the other.
    fn takes_unequal_rows(&self) -> bool {
        false
    }

    /// The longest sequence in tokens that the model has positions for; None, the default, without a limit.
    fn max_positions(&self) -> Option<usize> {
        None
    }

    /// Tokens that end a text according to the model's configuration; none by default.
    fn eos_tokens(&self) -> &[u32] {
        &[]
    }
}
