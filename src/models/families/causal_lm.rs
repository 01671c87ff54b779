//! A language model as generation uses it.

use crate::models::error::{Error, Result};
use crate::models::layers::KvCache;
use candle_core::{Device, Tensor};

/// A language model with a cache of the tokens it has seen. For inference: logits carry no gradient; those of
/// [`Llama::forward`](crate::models::Llama::forward) do.
pub trait CausalLm {
    /// Logits of `ids`, u32 `[batch, tokens]`, which follow the tokens in the cache: `[batch, tokens, vocab_size]`. Adds the tokens to
    /// the cache. Before a prompt is read in parts, tell the cache its length: [`KvCache::set_prompt_tokens`].
    ///
    /// # Errors
    /// If an id is not in the vocabulary, or the cache belongs to another model or has no room. The cache is then unchanged.
    fn forward_cached(&self, ids: &Tensor, cache: &mut KvCache) -> Result<Tensor>;

    /// [`CausalLm::forward_cached`] with the logits of the last token only, `[batch, vocab_size]`.
    ///
    /// # Errors
    /// As [`CausalLm::forward_cached`], and if `ids` has no token.
    fn last_logits(&self, ids: &Tensor, cache: &mut KvCache) -> Result<Tensor>;

    /// Logits after one more token of each of several sequences, `[sequences, vocab_size]`. `ids[i]` follows the tokens in `caches[i]`,
    /// which holds one sequence, and is added to it. The sequences may have different lengths and come from different batches.
    ///
    /// By default they are computed one after the other. A [`Llama`](crate::models::Llama) computes them together, and so reads its
    /// weights once.
    ///
    /// # Errors
    /// As [`CausalLm::last_logits`], and if there are not as many ids as caches, or none.
    fn step(&self, ids: &[u32], caches: &mut [&mut KvCache]) -> Result<Tensor> {
        check_step(ids, caches)?;
        let lengths: Vec<usize> = caches.iter().map(|cache| cache.len()).collect();
        let pairs = ids.iter().zip(caches.iter_mut());
        let logits = pairs.map(|(id, cache)| {
            let id = Tensor::from_slice(&[*id], (1, 1), self.device())?;
            self.last_logits(&id, cache)
        });
        let logits = logits.collect::<Result<Vec<_>>>();
        if logits.is_err() {
            let pairs = caches.iter_mut().zip(lengths);
            pairs.for_each(|(cache, len)| cache.truncate(len));
        }
        Ok(Tensor::cat(&logits?, 0)?)
    }

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

    /// The largest number of tokens that the model has positions for; None, the default, means no limit.
    fn max_positions(&self) -> Option<usize> {
        None
    }

    /// Tokens that end a text according to the model's configuration; none by default.
    fn eos_tokens(&self) -> &[u32] {
        &[]
    }
}

/// Checks that a step has a token for each of its caches, each of one sequence.
pub(super) fn check_step(ids: &[u32], caches: &[&mut KvCache]) -> Result<()> {
    let mismatch = |what, got: usize, expected: usize| {
        Err(Error::CacheMismatch {
            what,
            got: got.to_string(),
            expected: expected.to_string(),
        })
    };
    if ids.is_empty() || ids.len() != caches.len() {
        return mismatch("as many sequences as", caches.len(), ids.len().max(1));
    }
    match caches.iter().find(|cache| cache.batch() != 1) {
        Some(cache) => mismatch("a batch of", cache.batch(), 1),
        None => Ok(()),
    }
}
