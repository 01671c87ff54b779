//! Llama and its relatives: Mistral, Qwen2, Qwen3, Phi-3, and the mixtures Mixtral and Qwen3-MoE; with latent attention DeepSeek-V2,
//! DeepSeek-V3 and Mistral 4.

mod adapted;
mod attention;
mod blocks;
mod causal;
mod config;
mod defaults;
mod head;
mod joint;
mod latent;
mod mla_config;
mod mlp;
mod moe;
mod moe_config;
mod params;
mod router;
mod together;
mod training;

pub use config::LlamaConfig;
pub use mla_config::{MlaConfig, QueryGrowth};
pub use moe_config::{ExpertGroups, MoeConfig, MoeNames, RouterScores, Routing};

use super::causal_lm::CausalLm;
use crate::models::adapters::{Adapters, Host};
use crate::models::error::{Error, Result};
use crate::models::layers::{KvCache, KvScales, KvSizes, Projection, Rows, in_pool, token_rows};
use crate::nn::{Embedding, RmsNorm, VarBuilder, checkpoint, rms_norm};
use attention::Attention;
use candle_core::{DType, Device, Module, Tensor};
use causal::{Caches, Call, Part};
use fp8_recipes::Fp8Module;
use head::Head;
use latent::LatentAttention;
use mlp::Mlp;
use moe::Moe;

#[derive(Debug, Clone, Fp8Module)]
enum Feedforward {
    Dense(Mlp),
    Mixture(Box<Moe>),
}

#[derive(Debug, Clone, Fp8Module)]
enum SelfAttention {
    Heads(Box<Attention>),
    Latent(Box<LatentAttention>),
}

impl SelfAttention {
    fn new(config: &LlamaConfig, index: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(match &config.mla {
            None => Self::Heads(Box::new(Attention::new(config, index, vb)?)),
            Some(mla) => Self::Latent(Box::new(LatentAttention::new(config, mla, vb)?)),
        })
    }

    fn projections(&mut self) -> Vec<&mut Projection> {
        match self {
            Self::Heads(attention) => attention.projections().collect(),
            Self::Latent(attention) => attention.projections().collect(),
        }
    }

    fn freeze(&mut self) {
        match self {
            Self::Heads(attention) => attention.freeze(),
            Self::Latent(attention) => attention.freeze(),
        }
    }

    /// dequant_scales of keys and values, if the file has them.
    fn scales(&self) -> Option<KvScales> {
        match self {
            Self::Heads(attention) => attention.scales.clone(),
            Self::Latent(_) => None,
        }
    }
}

#[derive(Debug, Clone, Fp8Module)]
pub(crate) struct Layer {
    input_norm: RmsNorm,
    attention: SelfAttention,
    post_norm: RmsNorm,
    feedforward: Feedforward,
}

impl Layer {
    fn new(config: &LlamaConfig, index: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let norm = |name: &str| rms_norm(config.hidden_size, config.rms_norm_eps, vb.pp(name));
        let feedforward = match &config.moe {
            Some(moe) if !moe.dense_layers.contains(&index) => {
                Feedforward::Mixture(Moe::new(config, moe, vb.clone())?.into())
            }
            _ => {
                let sizes = (config.hidden_size, config.intermediate_size);
                Feedforward::Dense(Mlp::new(sizes, config.mlp_bias, mlp::NAMES, vb.pp("mlp"))?)
            }
        };
        Ok(Self {
            input_norm: norm("input_layernorm")?,
            attention: SelfAttention::new(config, index, vb.pp("self_attn"))?,
            post_norm: norm("post_attention_layernorm")?,
            feedforward,
        })
    }

    fn forward(&self, x: &Tensor, calls: &[Call], caches: Caches<'_>) -> Result<Tensor> {
        let normed = self.input_norm.forward(x)?;
        let attended = match &self.attention {
            SelfAttention::Heads(attention) => attention.forward(&normed, calls, caches)?,
            SelfAttention::Latent(attention) => attention.forward(&normed, calls, caches)?,
        };
        let x = (x + attended)?;
        let normed = self.post_norm.forward(&x)?;
        let y = match &self.feedforward {
            Feedforward::Dense(mlp) => mlp.forward(&normed)?,
            Feedforward::Mixture(moe) => moe.forward(&normed)?,
        };
        Ok((x + y)?)
    }

    /// The layer's output; the backward pass computes it again, with a copy of the layer that shares its tensors.
    fn recomputed(&self, x: &Tensor, calls: &[Call]) -> Result<Tensor> {
        let (layer, calls) = (self.clone(), calls.to_vec());
        let forward = move |x: &Tensor| -> candle_core::Result<Tensor> {
            Ok(layer.forward(x, &calls, Caches::None)?)
        };
        Ok(checkpoint(forward, x)?)
    }
}

/// A Llama-like language model, built on [`crate::nn`]: it trains, calibrates and serves.
///
/// From an FP8 checkpoint ([`crate::load`]) the linear layers hold codes only; from anything else they are in high precision
/// until [`prepare_fp8`](crate::prepare_fp8) and a guard. [`Llama::forward`] is for training; [`CausalLm`] has the forward
/// pass over a cache.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use fp8::models::{CausalLm, Llama, LlamaConfig};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let json = serde_json::json!({
///     "model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
///     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
/// });
/// let config = LlamaConfig::parse("config.json", &json)?;
/// let vars = VarMap::new();
/// let model = Llama::new(&config, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
/// let ids = Tensor::new(&[[1u32, 5, 9, 2]], &Device::Cpu)?;
/// let all = model.forward(&ids)?; // as in training
/// let mut cache = model.new_cache(1, 16)?;
/// model.last_logits(&ids.narrow(1, 0, 3)?, &mut cache)?;
/// let last = model.last_logits(&ids.narrow(1, 3, 1)?, &mut cache)?; // one more token
/// assert_eq!((all.dims(), last.dims()), ([1, 4, 128].as_slice(), [1, 128].as_slice()));
/// # Ok(()) }
/// ```
#[derive(Debug, Fp8Module)]
pub struct Llama {
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Head,
    #[fp8(skip)]
    recomputes: bool,
    /// The dtype to which the operands of products in high precision are rounded; None for that of the tensors.
    #[fp8(skip)]
    operands: Option<DType>,
    /// Whether some scale of an activation depends on all rows of a batch.
    #[fp8(skip)]
    shares_scales: bool,
    #[fp8(skip)]
    config: LlamaConfig,
    #[fp8(skip)]
    dtype: DType,
    #[fp8(skip)]
    device: Device,
    #[fp8(skip)]
    adapters: Adapters,
}

impl Llama {
    /// Builds the model from the tensors `model.*` and `lm_head.weight` of `vb`. Activations have `vb`'s dtype.
    ///
    /// With [`LlamaConfig::tie_word_embeddings`] and no `lm_head.weight` in the file, the embedding is the head.
    ///
    /// # Errors
    /// If a tensor is missing or has another shape.
    pub fn new(config: &LlamaConfig, vb: VarBuilder<'_>) -> Result<Self> {
        Self::with_embedding_dtype(config, vb.dtype(), vb)
    }

    /// [`Llama::new`] with the embedding, and a head tied to it, in the dtype `embedding`: 16-bit tables of a file need not be widened
    /// for lookups.
    ///
    /// # Errors
    /// As [`Llama::new`].
    pub fn with_embedding_dtype(
        config: &LlamaConfig,
        embedding: DType,
        vb: VarBuilder<'_>,
    ) -> Result<Self> {
        let root = vb.pp("model");
        let table = root.pp("embed_tokens").get_with_hints_dtype(
            (config.vocab_size, config.hidden_size),
            "weight",
            candle_nn::Init::Randn {
                mean: 0.,
                stdev: 0.02,
            },
            embedding,
        )?;
        let layers = (0..config.num_layers)
            .map(|i| Layer::new(config, i, root.pp("layers").pp(i)))
            .collect::<Result<_>>()?;
        let head = Head::new(config, &table, &vb)?;
        let mut model = Self {
            embedding: Embedding::new(table, config.hidden_size)
                .with_path(root.pp("embed_tokens").prefix()),
            layers,
            norm: rms_norm(config.hidden_size, config.rms_norm_eps, root.pp("norm"))?,
            head,
            recomputes: false,
            operands: None,
            shares_scales: false,
            config: config.clone(),
            dtype: vb.dtype(),
            device: vb.device().clone(),
            adapters: Adapters::default(),
        };
        let mut layers = model.projections().into_iter();
        model.shares_scales = layers.any(|layer| layer.shares_scales());
        Ok(model)
    }

    /// The configuration.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// Logits of all tokens, without a cache: `ids` `[batch, tokens]` of u32 to `[batch, tokens, vocab_size]`. Differentiable.
    ///
    /// # Errors
    /// If an id is not in the vocabulary or `ids` has another shape.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let x = self.run(ids, None)?;
        self.head.forward(&x, self.operands)
    }

    /// A cache of E4M3 codes with the k and v scales of the file, for `batch` sequences of up to `capacity` tokens; None if the file
    /// lacks them for some layer.
    ///
    /// # Errors
    /// If there is no memory for it, or a layer has neither one scale nor one per head.
    pub fn new_fp8_cache(&self, batch: usize, capacity: usize) -> Result<Option<KvCache>> {
        let layers = self.layers.iter();
        let scales: Vec<_> = layers.map(|layer| layer.attention.scales()).collect();
        match scales.iter().all(Option::is_some) {
            true => self.cache(batch, capacity, scales).map(Some),
            false => Ok(None),
        }
    }

    fn cache(
        &self,
        batch: usize,
        capacity: usize,
        scales: Vec<Option<KvScales>>,
    ) -> Result<KvCache> {
        let sizes = KvSizes {
            batch,
            kv_heads: self.config.num_kv_heads,
            capacity,
            head_dim: self.config.head_dim,
        };
        KvCache::new(sizes, scales, self.dtype, &self.device)
    }

    /// Features of all tokens after the final norm.
    fn run(&self, ids: &Tensor, mut cache: Option<&mut KvCache>) -> Result<Tensor> {
        let ids = token_rows(ids, self.config.vocab_size)?;
        let (batch, tokens) = ids.dims2()?;
        let rows = match &mut cache {
            None => vec![Rows {
                count: batch,
                ..Rows::default()
            }],
            Some(cache) => {
                cache.make_room(batch, tokens, self.layers.len())?;
                cache.rows()
            }
        };
        let prompt = cache.as_deref().map_or(0, KvCache::prompt_tokens);
        let calls = rows.into_iter().map(|rows| {
            Ok(Call {
                part: Part::Rows(rows),
                rope: self.rope(rows.seen, tokens, prompt)?,
                operands: self.operands,
            })
        });
        let calls = calls.collect::<Result<Vec<_>>>()?;
        let layers = cache.as_deref().map(|cache| &cache.layers);
        let x = self.through_layers(&ids, &calls, |layer| match layers {
            Some(layers) => Caches::Shared(&layers[layer]),
            None => Caches::None,
        })?;
        if let Some(cache) = cache {
            cache.advance(tokens);
        }
        Ok(x)
    }

    /// Cosines and sines of `tokens` positions from `seen` on, after or in a prompt of `prompt` tokens (0: unknown).
    fn rope(&self, seen: usize, tokens: usize, prompt: usize) -> Result<(Tensor, Tensor)> {
        (self.config.rope).tables(seen, tokens, prompt, self.dtype, &self.device)
    }

    /// Embedding, layers and final norm; `caches` has those of each layer.
    fn through_layers<'a>(
        &self,
        ids: &Tensor,
        calls: &[Call],
        caches: impl Fn(usize) -> Caches<'a>,
    ) -> Result<Tensor> {
        let mut x = self.embedding.forward(ids)?.to_dtype(self.dtype)?;
        for (i, layer) in self.layers.iter().enumerate() {
            x = match caches(i) {
                Caches::None if self.recomputes => layer.recomputed(&x, calls)?,
                caches => layer.forward(&x, calls, caches)?,
            };
        }
        Ok(self.norm.forward(&x)?)
    }
}

impl CausalLm for Llama {
    fn forward_cached(&self, ids: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        in_pool(&self.device, || {
            let x = self.run(ids, Some(cache))?.detach();
            Ok(self.head.forward(&x, self.operands)?.detach())
        })
    }

    fn last_logits(&self, ids: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        in_pool(&self.device, || {
            let x = self.run(ids, Some(cache))?.detach();
            let tokens = x.dim(1)?;
            if tokens == 0 {
                return Err(Error::TokenIds {
                    reason: "there is no token to continue from".into(),
                });
            }
            let last = x.narrow(1, tokens - 1, 1)?.squeeze(1)?;
            Ok(self.head.forward(&last, self.operands)?.detach())
        })
    }

    fn step(&self, ids: &[u32], caches: &mut [&mut KvCache]) -> Result<Tensor> {
        in_pool(&self.device, || self.step_together(ids, caches))
    }

    fn new_cache(&self, batch: usize, capacity: usize) -> Result<KvCache> {
        self.cache(batch, capacity, vec![None; self.layers.len()])
    }

    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn takes_unequal_rows(&self) -> bool {
        true
    }

    fn max_positions(&self) -> Option<usize> {
        self.config.positions()
    }

    fn eos_tokens(&self) -> &[u32] {
        &self.config.eos_token_ids
    }
}
