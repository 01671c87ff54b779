//! A GPT encoder layer and its training step.

use crate::upstream::GradientFrom;
use anyhow::{Context, Result, ensure};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use fp8::fp8_candle::ops::{AttentionOptions, attention_tokens_first};
use fp8::nn::{LayerNorm, Linear, layer_norm, linear, ops};
use fp8::optim::{AdamW, AdamWConfig};
use fp8::{
    Fp8Module, PrepareOptions, Recipe, RecipeName, check_gradients, fp8_autocast, prepare_fp8,
};

/// Sizes of the layer and of what goes through it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerConfig {
    pub hidden: usize,
    /// Tokens of a sequence.
    pub sequence: usize,
    /// Sequences.
    pub batch: usize,
    /// Hidden size of the MLP.
    pub ffn: usize,
    pub heads: usize,
    /// Whether tokens see only those before them.
    pub causal: bool,
}

impl Default for LayerConfig {
    /// The layer of Transformer Engine's tutorial.
    fn default() -> Self {
        Self {
            hidden: 4096,
            sequence: 2048,
            batch: 4,
            ffn: 16384,
            heads: 32,
            causal: false,
        }
    }
}

impl LayerConfig {
    pub fn tokens(&self) -> usize {
        self.batch * self.sequence
    }

    /// Operations of the matrix products, forward and backward.
    pub fn flop(&self) -> f64 {
        let (tokens, hidden) = (self.tokens() as f64, self.hidden as f64);
        let weights = 4. * hidden * hidden + 2. * hidden * self.ffn as f64;
        let keys = self.sequence as f64 / if self.causal { 2. } else { 1. };
        3. * tokens * (2. * weights + 4. * keys * hidden)
    }
}

/// LayerNorm, attention, residual, LayerNorm, MLP with GELU, residual.
#[derive(Fp8Module)]
pub struct EncoderLayer {
    norm_attention: LayerNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    proj: Linear,
    norm_mlp: LayerNorm,
    up: Linear,
    down: Linear,
    #[fp8(skip)]
    config: LayerConfig,
}

impl EncoderLayer {
    pub fn new(config: LayerConfig, vb: VarBuilder<'_>) -> Result<Self> {
        let LayerConfig {
            hidden, ffn, heads, ..
        } = config;
        ensure!(
            heads > 0 && hidden > 0 && hidden.is_multiple_of(heads),
            "a hidden size of {hidden} cannot be shared by {heads} heads"
        );
        // Three projections of the same input rather than one and its parts: the gradient of a part costs candle a tensor
        // of the whole.
        Ok(Self {
            norm_attention: layer_norm(hidden, 1e-5, vb.pp("norm_attention"))?,
            query: linear(hidden, hidden, vb.pp("query"))?,
            key: linear(hidden, hidden, vb.pp("key"))?,
            value: linear(hidden, hidden, vb.pp("value"))?,
            proj: linear(hidden, hidden, vb.pp("proj"))?,
            norm_mlp: layer_norm(hidden, 1e-5, vb.pp("norm_mlp"))?,
            up: linear(hidden, ffn, vb.pp("up"))?,
            down: linear(ffn, hidden, vb.pp("down"))?,
            config,
        })
    }
}

impl Module for EncoderLayer {
    /// `[batch, tokens, hidden]` to the same shape.
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let (batch, tokens, hidden) = x.dims3()?;
        let heads = self.config.heads;
        let normed = self.norm_attention.forward(x)?;
        let project = |projection: &Linear| {
            let y = projection.forward(&normed)?;
            y.reshape((batch, tokens, heads, hidden / heads))
        };
        let options = AttentionOptions::default().with_causal(self.config.causal);
        let (q, k, v) = (
            project(&self.query)?,
            project(&self.key)?,
            project(&self.value)?,
        );
        let y = attention_tokens_first(&q, &k, &v, options)?.reshape((batch, tokens, hidden))?;
        let x = (x + self.proj.forward(&y)?)?;
        let up = self.up.forward(&self.norm_mlp.forward(&x)?)?;
        &x + self.down.forward(&ops::gelu(&up)?)?
    }
}

/// Forward and backward passes of a layer, with gradients for its input and all its parameters.
pub struct LayerStep {
    layer: EncoderLayer,
    vars: VarMap,
    recipe: Option<Recipe>,
    x: Var,
    grad_output: Tensor,
}

impl LayerStep {
    /// Parameters, activations and gradients in `dtype`; random values.
    pub fn new(
        config: LayerConfig,
        dtype: DType,
        recipe: Option<RecipeName>,
        device: &Device,
    ) -> Result<Self> {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, dtype, device);
        let layer = EncoderLayer::new(config, vb)?;
        if recipe.is_some() {
            prepare_fp8(&layer, &PrepareOptions::default())?;
        }
        let shape = (config.batch, config.sequence, config.hidden);
        let normal = || Tensor::randn(0f32, 1., shape, device)?.to_dtype(dtype);
        Ok(Self {
            layer,
            vars,
            recipe: recipe.map(Recipe::from),
            x: Var::from_tensor(&normal()?)?,
            grad_output: normal()?,
        })
    }

    /// The parameters by name.
    pub fn vars(&self) -> &VarMap {
        &self.vars
    }

    /// One step: all gradients.
    pub fn run(&self) -> Result<GradStore> {
        let guard = self.recipe.clone().map(fp8_autocast).transpose()?;
        let y = self.layer.forward(&self.x)?;
        if let Some(guard) = guard {
            guard.close()?;
        }
        let end = y.apply_op1(GradientFrom(self.grad_output.clone()))?;
        Ok(end.backward()?)
    }

    /// Fails if a gradient is missing.
    pub fn check(&self, grads: &GradStore) -> Result<()> {
        let missing = check_gradients(&self.vars, grads);
        ensure!(
            missing.is_empty(),
            "no gradient reached {}",
            missing.join(", ")
        );
        grads
            .get(&self.x)
            .context("no gradient reached the input")?;
        Ok(())
    }

    /// An optimizer of the parameters. Between timed steps it changes every weight, so that no cast of a step before serves
    /// again, as in training; its state takes three times the memory of f32 parameters at most.
    pub fn optimizer(&self) -> Result<AdamW> {
        let config = AdamWConfig {
            lr: 1e-4,
            ..AdamWConfig::default()
        };
        Ok(AdamW::from_varmap(&self.vars, config)?)
    }
}
