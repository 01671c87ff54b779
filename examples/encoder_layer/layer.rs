//! A GPT encoder layer and its training step, in any precision.

#[path = "../shared/attention.rs"]
pub mod attention;

use crate::upstream::gradient_from;
use anyhow::{Context, Result, ensure};
use attention::Operands;
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use fp8::nn::ops::Activation;
use fp8::nn::{LayerInputs, NormKind, TransformerConfig, TransformerLayer, transformer_layer};
use fp8::optim::{AdamW, AdamWConfig};
use fp8::{PrepareOptions, Recipe, RecipeName, check_gradients, fp8_autocast, prepare_fp8};

/// Sizes of the layer and of its input.
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
    /// Whether tokens attend to earlier ones only.
    pub causal: bool,
    /// Operands of attention's products; None for the recipe's default.
    pub attention: Option<Operands>,
}

impl Default for LayerConfig {
    /// [`LayerConfig::published`].
    fn default() -> Self {
        Self::published()
    }
}

impl LayerConfig {
    /// The layer of Transformer Engine's tutorial and of fp8layers' example.
    pub fn published() -> Self {
        Self {
            hidden: 4096,
            sequence: 2048,
            batch: 4,
            ffn: 16384,
            heads: 32,
            causal: false,
            attention: None,
        }
    }

    /// A layer for a CPU: a step takes tenths of a second.
    pub fn small() -> Self {
        Self {
            hidden: 768,
            sequence: 256,
            batch: 2,
            ffn: 3072,
            heads: 12,
            ..Self::published()
        }
    }

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

/// LayerNorm, attention, residual, LayerNorm, MLP with GELU, residual: one node of candle's graph.
fn encoder_layer(
    config: LayerConfig,
    attention: Operands,
    vb: VarBuilder<'_>,
) -> Result<TransformerLayer> {
    let LayerConfig {
        hidden, ffn, heads, ..
    } = config;
    ensure!(
        heads > 0 && hidden > 0 && hidden.is_multiple_of(heads),
        "a hidden size of {hidden} cannot be shared by {heads} heads"
    );
    let layer = TransformerConfig::new(hidden, heads)
        .with_intermediate_size(ffn)
        .with_norm(NormKind::LayerNorm)
        .with_norm_eps(1e-5)
        .with_hidden_act(Activation::Gelu)
        .with_bias(true)
        .with_causal(config.causal);
    let heads = layer.attention.clone().with_operands(attention.dtype());
    let layer = layer.with_attention(heads);
    Ok(transformer_layer(&layer, vb)?)
}

/// The dtypes of a step, and its recipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    pub parameters: DType,
    /// Of activations, and of products outside the recipe. Each call casts the parameters to it; those of products in FP8 are cast by
    /// the recipe instead.
    pub activations: DType,
    pub recipe: Option<RecipeName>,
}

impl Precision {
    /// Parameters and activations in one dtype.
    pub fn of(dtype: DType, recipe: Option<RecipeName>) -> Self {
        Self {
            parameters: dtype,
            activations: dtype,
            recipe,
        }
    }

    /// f32 throughout.
    pub fn full() -> Self {
        Self::of(DType::F32, None)
    }

    /// Mixed precision: f32 parameters, everything else in `activations`.
    pub fn mixed(activations: DType) -> Self {
        Self {
            activations,
            ..Self::full()
        }
    }

    /// [`Precision::mixed`] with the products of linear layers in FP8.
    pub fn fp8(activations: DType, recipe: RecipeName) -> Self {
        Self {
            recipe: Some(recipe),
            ..Self::mixed(activations)
        }
    }
}

/// The input of a layer and the gradient of its output, in f32.
pub struct Inputs {
    x: Tensor,
    grad_output: Tensor,
}

impl Inputs {
    pub fn random(config: LayerConfig, device: &Device) -> Result<Self> {
        let shape = (config.batch, config.sequence, config.hidden);
        let normal = || Tensor::randn(0f32, 1., shape, device);
        Ok(Self {
            x: normal()?,
            grad_output: normal()?,
        })
    }
}

/// The results of a step.
pub struct Pass {
    pub output: Tensor,
    pub grads: GradStore,
}

/// Forward and backward passes of a layer, with gradients for its input and all its parameters.
pub struct LayerStep {
    layer: TransformerLayer,
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
        let (vars, inputs) = (VarMap::new(), Inputs::random(config, device)?);
        Self::with(config, Precision::of(dtype, recipe), &vars, &inputs)
    }

    /// A step of the parameters in `vars`, which steps may share; the first one makes them.
    pub fn with(
        config: LayerConfig,
        precision: Precision,
        vars: &VarMap,
        inputs: &Inputs,
    ) -> Result<Self> {
        let Precision {
            parameters,
            activations,
            recipe,
        } = precision;
        let vb = VarBuilder::from_varmap(vars, parameters, inputs.x.device());
        let operands = (config.attention).unwrap_or(Operands::of_run(recipe.is_some()));
        let layer = encoder_layer(config, operands, vb)?;
        if recipe.is_some() {
            prepare_fp8(&layer, &PrepareOptions::default())?;
        }
        Ok(Self {
            layer,
            vars: vars.clone(),
            recipe: recipe.map(|recipe| operands.in_recipe(recipe.into())),
            x: Var::from_tensor(&inputs.x.to_dtype(activations)?)?,
            grad_output: inputs.grad_output.to_dtype(activations)?,
        })
    }

    /// The parameters by name.
    pub fn vars(&self) -> &VarMap {
        &self.vars
    }

    /// One step: all gradients.
    pub fn run(&self) -> Result<GradStore> {
        Ok(self.pass()?.grads)
    }

    /// One step: the output and all gradients.
    pub fn pass(&self) -> Result<Pass> {
        let guard = self.recipe.clone().map(fp8_autocast).transpose()?;
        let y = self.layer.forward(&self.x, &LayerInputs::default())?;
        if let Some(guard) = guard {
            guard.close()?;
        }
        let output = y.detach();
        let end = gradient_from(&y, &self.grad_output)?;
        let grads = end.backward()?;
        Ok(Pass { output, grads })
    }

    /// The gradient of the input.
    pub fn grad_input<'a>(&self, grads: &'a GradStore) -> Result<&'a Tensor> {
        let grad = grads.get(&self.x);
        grad.context("no gradient reached the input")
    }

    /// Fails if a gradient is missing.
    pub fn check(&self, grads: &GradStore) -> Result<()> {
        let missing = check_gradients(&self.vars, grads);
        ensure!(
            missing.is_empty(),
            "no gradient reached {}",
            missing.join(", ")
        );
        self.grad_input(grads)?;
        Ok(())
    }

    /// An optimizer of the parameters. Between timed steps it changes every weight, so that each step casts weights anew,
    /// as in training; its state takes three times the memory of f32 parameters at most.
    pub fn optimizer(&self) -> Result<AdamW> {
        let config = AdamWConfig {
            lr: 1e-4,
            ..AdamWConfig::default()
        };
        Ok(AdamW::from_varmap(&self.vars, config)?)
    }
}
