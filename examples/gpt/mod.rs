//! A small GPT on `fp8_recipes::nn`: pre-norm blocks, rotary positions, GELU MLP. One definition for plain tensors, FP8
//! recipes and scaled arithmetic.

#[path = "../shared/attention.rs"]
pub mod attention;

use anyhow::{Context, Result, ensure};
use attention::Operands;
use candle_core::{D, DType, Device, IndexOp, Tensor};
use candle_nn::VarBuilder;
use clap::ValueEnum;
use fp8::nn::ops::Activation;
use fp8::nn::{
    AttentionConfig, Embedding, KeyValues, LayerInputs, LayerNorm, LayerNormMlp, Linear, MlpInput,
    MultiheadAttention, Projections, TransformerLayer, embedding, layer_norm, linear,
    linear_no_bias,
};
use fp8::scaled::{Array, Direction, Layer, Norm};
use fp8::{Fp8Layer, Fp8Module, Visitor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, Normal};
use serde::{Deserialize, Serialize};

/// Shape of the model, as stored in `config.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GptConfig {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_layers: usize,
    pub num_heads: usize,
    /// The window of attention, in tokens.
    pub context: usize,
    /// Operands of attention's products. None means [`Operands::F32`] in a file; a run then takes the default of its recipe.
    #[serde(default)]
    pub attention: Option<Operands>,
    /// What blocks compute on and keep for the backward pass.
    #[serde(default)]
    pub activations: Activations,
}

/// The dtype of the tensors between layers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Activations {
    /// That of the parameters.
    #[default]
    F32,
    /// Half of the bytes, and less time on GPUs and on processors with bf16 units; parameters, the last norm and the head stay as
    /// they are.
    Bf16,
}

impl Default for GptConfig {
    fn default() -> Self {
        Self {
            vocab_size: 256,
            hidden_size: 256,
            num_layers: 4,
            num_heads: 4,
            context: 128,
            attention: None,
            activations: Activations::F32,
        }
    }
}

impl GptConfig {
    fn head_size(&self) -> usize {
        self.hidden_size / self.num_heads
    }
}

/// Keys and values of the tokens seen so far, for each block.
pub struct KvCache<A = Tensor> {
    layers: Vec<KeyValues<A>>,
    seen: usize,
}

/// A pre-norm layer: one node of the graph on plain tensors.
fn block(config: &GptConfig, vb: VarBuilder<'_>) -> Result<TransformerLayer> {
    let d = config.hidden_size;
    let project = |name| linear(d, d, vb.pp(format!("attention.{name}")));
    let qkv = Projections::Separate {
        query: project("query")?,
        key: project("key")?,
        value: project("value")?,
    };
    let heads = AttentionConfig::new(config.num_heads, config.head_size())
        .with_causal(true)
        .with_sliding_window(config.context)
        .with_operands(config.attention.and_then(Operands::dtype));
    let input = MlpInput::Up(linear(d, 4 * d, vb.pp("up"))?);
    let down = linear(4 * d, d, vb.pp("down"))?;
    Ok(TransformerLayer::new(
        layer_norm(d, 1e-5, vb.pp("norm_attention"))?,
        MultiheadAttention::new(None, qkv, project("proj")?, heads),
        layer_norm(d, 1e-5, vb.pp("norm_mlp"))?,
        LayerNormMlp::new(None, input, down, Activation::Gelu),
    ))
}

/// The model. Input: tokens as U32 `[batch, tokens]`; output: logits `[batch, tokens, vocab_size]`.
#[derive(Fp8Module)]
pub struct Gpt {
    embed: Embedding,
    blocks: Vec<TransformerLayer>,
    norm: LayerNorm,
    lm_head: Linear,
    #[fp8(skip)]
    config: GptConfig,
    dtype: DType,
}

impl Gpt {
    pub fn new(config: &GptConfig, vb: VarBuilder<'_>) -> Result<Self> {
        let d = config.hidden_size;
        ensure!(
            config.num_heads > 0 && d.is_multiple_of(2 * config.num_heads),
            "hidden size {d} is not a multiple of twice the {} heads",
            config.num_heads
        );
        let blocks = (0..config.num_layers)
            .map(|i| block(config, vb.pp(format!("blocks.{i}"))))
            .collect::<Result<_>>()?;
        Ok(Self {
            embed: embedding(config.vocab_size, d, vb.pp("embed"))?,
            blocks,
            norm: layer_norm(d, 1e-5, vb.pp("norm"))?,
            lm_head: linear_no_bias(d, config.vocab_size, vb.pp("lm_head"))?,
            config: config.clone(),
            dtype: vb.dtype(),
        })
    }

    /// Whether blocks compute inner tensors again in the backward pass instead of keeping them, to the bit.
    pub fn set_recomputation(&mut self, recomputation: bool) {
        for block in &mut self.blocks {
            *block = block.clone().with_recomputation(recomputation);
        }
    }

    pub fn forward<A: Array>(&self, tokens: &Tensor) -> Result<A> {
        self.run(tokens, 0, None)
    }

    /// Logits of `tokens`, which follow those in the cache.
    pub fn forward_cached<A: Array>(&self, tokens: &Tensor, cache: &mut KvCache<A>) -> Result<A> {
        let first = cache.seen;
        cache.seen += tokens.dim(D::Minus1)?;
        self.run(tokens, first, Some(&mut cache.layers))
    }

    fn run<A: Array>(
        &self,
        tokens: &Tensor,
        first: usize,
        mut caches: Option<&mut Vec<KeyValues<A>>>,
    ) -> Result<A> {
        let (cos, sin) = self.rope(first, tokens.dim(D::Minus1)?, tokens.device())?;
        let inner = match self.config.activations {
            Activations::F32 => self.dtype,
            Activations::Bf16 => DType::BF16,
        };
        let (cos, sin) = (cos.to_dtype(inner)?, sin.to_dtype(inner)?);
        let inputs = LayerInputs::default().with_rope(&cos, &sin);
        let embedded: A = self.embed.lookup(tokens)?;
        let mut x = embedded.to_dtype(inner)?;
        for (i, block) in self.blocks.iter().enumerate() {
            x = match caches.as_mut() {
                None => block.forward_array(&x, &inputs)?,
                Some(caches) => block.forward_cached(&x, &inputs, &mut caches[i])?,
            };
        }
        let last = self.norm.apply(&x.to_dtype(self.dtype)?)?;
        let logits = self.lm_head.apply(&last)?;
        Ok(logits.rescale(Norm::L2, Direction::Backward)?)
    }

    /// cos and sin, `[tokens, head_size / 2]`, of positions from `first`.
    fn rope(&self, first: usize, tokens: usize, device: &Device) -> Result<(Tensor, Tensor)> {
        let half = self.config.head_size() / 2;
        let angles: Vec<f32> = (first..first + tokens)
            .flat_map(|position| {
                (0..half).map(move |i| {
                    let frequency = 10_000f64.powf(-(i as f64) / half as f64);
                    ((position as f64 * frequency) % std::f64::consts::TAU) as f32
                })
            })
            .collect();
        let angles = Tensor::from_vec(angles, (tokens, half), device)?;
        Ok((
            angles.cos()?.to_dtype(self.dtype)?,
            angles.sin()?.to_dtype(self.dtype)?,
        ))
    }

    pub fn new_cache<A>(&self) -> KvCache<A> {
        let layers = self.blocks.iter().map(|_| KeyValues::default()).collect();
        KvCache { layers, seen: 0 }
    }

    /// (bytes held by the weights of linear layers, what f32 weights would take).
    pub fn linear_weight_bytes(&self) -> (usize, usize) {
        struct Bytes(usize, usize);
        impl Visitor for Bytes {
            fn layer(&mut self, linear: &dyn Fp8Layer) {
                self.0 += linear.weight_bytes();
                let (out_features, in_features) = linear.features();
                self.1 += 4 * out_features * in_features;
            }
            fn tensor(&mut self, _: Option<&str>, _: &Tensor) {}
        }
        let mut bytes = Bytes(0, 0);
        self.visit(&mut bytes);
        (bytes.0, bytes.1)
    }

    /// Continues `prompt` by `count` tokens; `temperature` 0 takes the likeliest.
    pub fn generate(
        &self,
        prompt: &[u32],
        count: usize,
        temperature: f64,
        seed: u64,
        mut each: impl FnMut(u32),
    ) -> Result<Vec<u32>> {
        ensure!(
            !prompt.is_empty(),
            "the prompt is empty: give at least one token"
        );
        let device = self.embed.embeddings().device();
        let mut rng = StdRng::seed_from_u64(seed);
        let mut cache: KvCache = self.new_cache();
        // Attention looks back no further than its context.
        let start = prompt.len().saturating_sub(self.config.context);
        let mut next = prompt[start..].to_vec();
        let mut text = vec![];
        while text.len() < count {
            let tokens = Tensor::from_slice(&next, (1, next.len()), device)?;
            let logits = self.forward_cached(&tokens, &mut cache)?;
            let last = logits
                .i((0, next.len() - 1))?
                .to_dtype(DType::F32)?
                .to_vec1::<f32>()?;
            let token = u32::try_from(sample(&last, temperature, &mut rng)?)?;
            each(token);
            text.push(token);
            next = vec![token];
        }
        Ok(text)
    }
}

fn sample(logits: &[f32], temperature: f64, rng: &mut StdRng) -> Result<usize> {
    let (best, max) = logits
        .iter()
        .copied()
        .enumerate()
        .max_by(|a, b| a.1.total_cmp(&b.1))
        .context("the model has no vocabulary")?;
    ensure!(max.is_finite(), "the model's logits are not finite");
    if temperature <= 0. {
        return Ok(best);
    }
    let weights: Vec<f64> = logits
        .iter()
        .map(|&l| (f64::from(l - max) / temperature).exp())
        .collect();
    let mut left = rng.random::<f64>() * weights.iter().sum::<f64>();
    for (i, weight) in weights.iter().enumerate() {
        left -= weight;
        if left <= 0. {
            return Ok(i);
        }
    }
    Ok(best)
}

/// GPT-2's initial values from a seed, by name and shape.
pub fn initial(
    config: &GptConfig,
    seed: u64,
) -> impl FnMut(&str, &[usize]) -> Result<Option<Tensor>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let num_layers = config.num_layers as f64;
    move |name, shape| {
        if let [_, _] = shape {
            // Residual branches shrink with depth, so that the sum keeps its size.
            let residual = name.ends_with("proj.weight") || name.ends_with("down.weight");
            let depth = if residual { 2. * num_layers } else { 1. };
            let normal = Normal::new(0f32, (0.02 / depth.sqrt()) as f32)?;
            let count = shape.iter().product();
            let values: Vec<f32> = (0..count).map(|_| normal.sample(&mut rng)).collect();
            return Ok(Some(Tensor::from_vec(values, shape, &Device::Cpu)?));
        }
        // Gains of norms start at 1.
        let zeros = || Tensor::zeros(shape, DType::F32, &Device::Cpu);
        Ok(name.ends_with(".bias").then(zeros).transpose()?)
    }
}
