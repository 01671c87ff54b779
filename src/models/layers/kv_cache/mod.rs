//! Keys and values of the tokens seen so far.

mod growth;

use super::layer_cache::{KvScales, LayerCache, Side};
use crate::models::error::{Error, Result};
use candle_core::{DType, Device, Tensor};

/// The sizes of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KvSizes {
    pub(crate) batch: usize,
    pub(crate) kv_heads: usize,
    pub(crate) capacity: usize,
    pub(crate) head_dim: usize,
}

impl KvSizes {
    /// Fails if the size overflows or the memory is not there: an allocation that fails later would end the program.
    fn check_memory(self, layers: usize, dtype: DType) -> Result<()> {
        let factors = [
            self.batch,
            self.kv_heads,
            self.capacity,
            self.head_dim,
            2 * dtype.size_in_bytes(),
            layers,
        ];
        let bytes = factors.into_iter().try_fold(1usize, usize::checked_mul);
        let fits = bytes.is_some_and(|bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_ok());
        match fits {
            true => Ok(()),
            false => Err(Error::CacheMemory {
                batch: self.batch,
                capacity: self.capacity,
            }),
        }
    }
}

/// Rows of a batch that have seen the same number of tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Rows {
    pub(crate) start: usize,
    pub(crate) count: usize,
    pub(crate) seen: usize,
}

/// The keys and values of every layer for the tokens that a batch of sequences has seen so far.
///
/// Memory grows with the tokens, by doubling, up to [`KvCache::capacity`]; more tokens are an error. Made by
/// [`CausalLm::new_cache`](crate::models::CausalLm::new_cache). It holds values in the model's dtype, or E4M3 codes with the scales
/// of the file ([`Llama::new_fp8_cache`](crate::models::Llama::new_fp8_cache)). It is for inference: logits computed with it carry no gradient.
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
/// let mut cache = model.new_cache(1, 4)?;
/// model.last_logits(&Tensor::new(&[[1u32, 5, 9]], &Device::Cpu)?, &mut cache)?;
/// let two = Tensor::new(&[[2u32, 3]], &Device::Cpu)?;
/// assert!(model.last_logits(&two, &mut cache).is_err()); // room for one
/// cache.truncate(2); // as if only two had been seen
/// model.last_logits(&two, &mut cache)?;
/// assert_eq!(cache.len(), 4);
/// # Ok::<(), fp8::models::Error>(())
/// ```
#[derive(Debug)]
pub struct KvCache {
    pub(crate) layers: Vec<LayerCache>,
    /// Their `capacity` is what the cache may grow to; [`KvCache::allocated`] is the present one.
    sizes: KvSizes,
    /// Tokens seen of each sequence.
    seen: Vec<usize>,
    /// Tokens of the prompt, if that is known; otherwise 0.
    prompt: usize,
}

/// A new cache has memory for this many tokens at most.
const FIRST: usize = 64;

impl KvCache {
    /// `scales` has one entry per layer; None stores values in `dtype`.
    pub(crate) fn new(
        sizes: KvSizes,
        scales: Vec<Option<KvScales>>,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        // Checks the full capacity: a cache that can never fit fails before anything is computed.
        sizes.check_memory(scales.len(), dtype)?;
        let KvSizes {
            batch,
            kv_heads,
            capacity,
            head_dim,
        } = sizes;
        let shape = (batch, kv_heads, capacity.min(FIRST), head_dim);
        let side = |scales: Option<Vec<f32>>| {
            let dtype = if scales.is_some() { DType::U8 } else { dtype };
            let dequant_scales = match scales {
                Some(scales) if scales.len() == 1 => Some(vec![scales[0]; kv_heads]),
                Some(scales) if scales.len() != kv_heads => {
                    return Err(Error::CacheMismatch {
                        what: "scales of heads of keys and values:",
                        got: scales.len().to_string(),
                        expected: format!("1 or {kv_heads}"),
                    });
                }
                scales => scales,
            };
            Ok(Side {
                stored: Tensor::zeros(shape, dtype, device)?,
                dequant_scales,
            })
        };
        let layers = scales.into_iter().map(|scales| {
            let (k, v) = scales.map(|KvScales { k, v }| (k, v)).unzip();
            Ok(LayerCache {
                k: side(k)?,
                v: side(v)?,
            })
        });
        Ok(Self {
            layers: layers.collect::<Result<_>>()?,
            seen: vec![0; sizes.batch],
            sizes,
            prompt: 0,
        })
    }

    /// Tokens seen by the longest sequence.
    pub fn len(&self) -> usize {
        self.seen.iter().copied().max().unwrap_or(0)
    }

    /// Whether no token has been seen.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The maximum number of tokens in a sequence.
    pub fn capacity(&self) -> usize {
        self.sizes.capacity
    }

    /// Sequences in the batch.
    pub fn batch(&self) -> usize {
        self.sizes.batch
    }

    /// Whether keys and values are FP8 codes.
    pub fn is_fp8(&self) -> bool {
        self.layers
            .iter()
            .any(|layer| layer.k.dequant_scales.is_some())
    }

    /// Bytes allocated for keys and values; they grow with the tokens.
    pub fn size_in_bytes(&self) -> usize {
        let bytes = |side: &Side| side.stored.elem_count() * side.stored.dtype().size_in_bytes();
        let layers = self.layers.iter();
        layers.map(|layer| bytes(&layer.k) + bytes(&layer.v)).sum()
    }

    /// Says how many tokens the prompt of every sequence has, before its first part is read. Rotary positions that depend on the length of
    /// a text (`dynamic` and `longrope` scaling) are then those of the whole prompt, so that a prompt in parts gives the logits that it gives
    /// at once. Without it, and beyond the prompt, the length is counted up to the last token of each call. It changes nothing for other models.
    ///
    /// It holds until it is set again, also after [`KvCache::truncate`]; 0 means that nothing is known.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8::models::{CausalLm, Llama, LlamaConfig};
    /// # let json = serde_json::json!({ "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16,
    /// #     "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 4,
    /// #     "rope_scaling": { "rope_type": "dynamic", "factor": 2.0 } });
    /// # let config = LlamaConfig::parse("config.json", &json)?;
    /// # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// # let model = Llama::new(&config, vb)?;
    /// let prompt = Tensor::new(&[[1u32, 5, 9, 2, 3, 8]], &Device::Cpu)?; // the model was trained on 4 tokens
    /// let whole = model.last_logits(&prompt, &mut model.new_cache(1, 6)?)?;
    /// let mut cache = model.new_cache(1, 6)?;
    /// cache.set_prompt_tokens(6);
    /// model.last_logits(&prompt.narrow(1, 0, 3)?, &mut cache)?;
    /// let parts = model.last_logits(&prompt.narrow(1, 3, 3)?, &mut cache)?;
    /// assert_eq!(parts.to_vec2::<f32>()?, whole.to_vec2::<f32>()?);
    /// # Ok::<(), fp8::models::Error>(())
    /// ```
    pub fn set_prompt_tokens(&mut self, tokens: usize) {
        self.prompt = tokens;
    }

    /// What [`KvCache::set_prompt_tokens`] has set.
    pub(crate) fn prompt_tokens(&self) -> usize {
        self.prompt
    }

    /// Forgets all tokens after the first `len`; no effect if there are fewer.
    pub fn truncate(&mut self, len: usize) {
        for seen in &mut self.seen {
            *seen = len.min(*seen);
        }
    }

    /// Counts tokens that every layer has appended.
    pub(crate) fn advance(&mut self, tokens: usize) {
        for seen in &mut self.seen {
            *seen += tokens;
        }
    }
}
