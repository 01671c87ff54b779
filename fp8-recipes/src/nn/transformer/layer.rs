//! A whole transformer layer.

use super::attention::{MultiheadAttention, attention};
use super::block::{Block, calls};
use super::config::{NormPlacement, TransformerConfig, check_dropout};
use super::inputs::LayerInputs;
use super::key_values::KeyValues;
use super::layer_norm_linear::norm;
use super::mlp::{LayerNormMlp, mlp};
use super::{LayerNorm, Linear};
use crate::Fp8Module;
use crate::array::{Array, Layer};
use crate::error::Result;
use candle_core::Tensor;
use candle_nn::VarBuilder;
use fp8_core::setters;
use fp8_scaled::{Direction, Norm};

/// Attention and MLP with norms and residuals, as one node.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use fp8::nn::{LayerInputs, TransformerConfig, transformer_layer};
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let layer = transformer_layer(&TransformerConfig::new(16, 2).with_causal(true), vb)?;
/// let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
/// let y = layer.forward(&x, &LayerInputs::default())?;
/// let grads = y.sum_all()?.backward()?;
/// assert!(vars.all_vars().iter().all(|var| grads.get(var).is_some()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Fp8Module)]
#[fp8(crate = "crate")]
pub struct TransformerLayer {
    norm_attention: LayerNorm,
    attention: MultiheadAttention,
    norm_mlp: LayerNorm,
    mlp: LayerNormMlp,
    #[fp8(skip)]
    placement: NormPlacement,
    hidden_dropout: f64,
    single_node: bool,
}

impl TransformerLayer {
    /// A layer with norms before attention and MLP, which have no norms of their own.
    pub fn new(
        norm_attention: LayerNorm,
        attention: MultiheadAttention,
        norm_mlp: LayerNorm,
        mlp: LayerNormMlp,
    ) -> Self {
        Self {
            norm_attention,
            attention,
            norm_mlp,
            mlp,
            placement: NormPlacement::Pre,
            hidden_dropout: 0.,
            single_node: true,
        }
    }

    /// A copy with or without [computing inner tensors again](super::TransformerConfig::with_recomputation).
    pub fn with_recomputation(self, recomputation: bool) -> Self {
        Self {
            mlp: self.mlp.with_recomputation(recomputation),
            ..self
        }
    }

    /// A copy that is one node of the graph, or one node per layer.
    pub fn with_single_node(self, single_node: bool) -> Self {
        Self {
            attention: self.attention.with_single_node(single_node),
            mlp: self.mlp.with_single_node(single_node),
            single_node,
            ..self
        }
    }

    /// The attention.
    pub fn attention(&self) -> &MultiheadAttention {
        &self.attention
    }

    /// The feed-forward network.
    pub fn mlp(&self) -> &LayerNormMlp {
        &self.mlp
    }

    fn check_dropout(&self) -> Result<()> {
        let path = self.attention.out().path().unwrap_or_default();
        check_dropout(
            path,
            "TransformerConfig::hidden_dropout",
            self.hidden_dropout,
        )
    }
}

calls!(tokens TransformerLayer);

setters! { TransformerLayer:
    /// A copy with another placement of the norms.
    with_norm_placement(placement: NormPlacement);
    /// A copy with dropout of the results of attention and MLP.
    with_hidden_dropout(hidden_dropout: f64);
}

impl Block for TransformerLayer {
    const NAME: &'static str = "transformer-layer";

    fn norms(&self) -> Vec<&LayerNorm> {
        let mut norms = vec![&self.norm_attention, &self.norm_mlp];
        norms.extend(self.attention.norms());
        norms.extend(self.mlp.norms());
        norms
    }

    fn linears(&self) -> Vec<&Linear> {
        let mut linears = self.attention.linears();
        linears.extend(self.mlp.linears());
        linears
    }

    fn wants_single_node(&self) -> bool {
        let parts = self.attention.wants_single_node() && self.mlp.wants_single_node();
        self.single_node && parts
    }

    fn recomputes(&self) -> bool {
        self.mlp.recomputes()
    }

    fn body<A: Array>(
        &self,
        x: &A,
        inputs: &LayerInputs<'_>,
        cache: Option<&mut KeyValues<A>>,
    ) -> Result<A> {
        self.check_dropout()?;
        let dropped = |y: A, place| match inputs.seed(self.attention.out().path(), place) {
            Some(seed) => y.dropout(self.hidden_dropout, seed),
            None => Ok(y),
        };
        let x = x.rescale(Norm::L2, Direction::Backward)?;
        match self.placement {
            NormPlacement::Pre => {
                let normed = self.norm_attention.apply(&x)?;
                let y = self.attention.body(&normed, inputs, cache)?;
                let x = x.add(&dropped(y, 1)?)?;
                let y = self.mlp.body(&self.norm_mlp.apply(&x)?, inputs, None)?;
                x.add(&dropped(y, 2)?)
            }
            NormPlacement::Post => {
                let y = self.attention.body(&x, inputs, cache)?;
                let x = self.norm_attention.apply(&x.add(&dropped(y, 1)?)?)?;
                let y = self.mlp.body(&x, inputs, None)?;
                self.norm_mlp.apply(&x.add(&dropped(y, 2)?)?)
            }
        }
    }
}

/// A [`TransformerLayer`] with the names of Llama's layers: `input_layernorm`, `self_attn.q_proj`, `self_attn.k_proj`,
/// `self_attn.v_proj`, `self_attn.o_proj`, `post_attention_layernorm`, `mlp.gate_proj`, `mlp.up_proj`, `mlp.down_proj`.
///
/// # Errors
/// If a tensor is missing or has another shape.
pub fn transformer_layer(
    config: &TransformerConfig,
    vb: VarBuilder<'_>,
) -> candle_core::Result<TransformerLayer> {
    let norm = |name| norm(config.hidden_size, config, vb.pp(name));
    let layer = TransformerLayer::new(
        norm("input_layernorm")?,
        attention(None, config, vb.pp("self_attn"))?,
        norm("post_attention_layernorm")?,
        mlp(None, config, vb.pp("mlp"))?,
    );
    Ok(layer
        .with_norm_placement(config.norm_placement)
        .with_hidden_dropout(config.hidden_dropout))
}
