//! Transformer modules that are single nodes of candle's graph.
//!
//! | module | Transformer Engine's |
//! |---|---|
//! | [`LayerNormLinear`] | `LayerNormLinear` |
//! | [`LayerNormMlp`] | `LayerNormMLP` |
//! | [`MultiheadAttention`] | `MultiheadAttention` |
//! | [`TransformerLayer`] | `TransformerLayer` |
//!
//! They are made of [`Linear`]s and [`LayerNorm`]s, from a `VarBuilder` or from layers that a model has already, and show these
//! to [`prepare_fp8`](crate::prepare_fp8), checkpoints and exports by their paths: a checkpoint of the separate layers loads into a
//! module and the other way around. Their results are those of the separate layers; gradients that meet are added in another
//! order. What a module gains: gradients between its operations never reach candle's graph, inputs that several layers
//! share are cast once, and the backward pass keeps FP8 codes instead of tensors where it can.
//!
//! Where a single node is not possible the layers are called one by one: for scaled arithmetic, for parameters on a
//! [`ScaledVarMap`](crate::scaled::ScaledVarMap), where a recipe casts the tensors around norms (emulation), in f64, with a cache of
//! keys and values, and with `with_single_node(false)`, which tests compare with.

mod attention;
mod block;
pub(super) mod config;
pub(in crate::nn) mod inputs;
mod key_values;
mod layer;
mod layer_norm_linear;
mod mlp;
mod room;

pub use attention::{MultiheadAttention, Projections, multihead_attention};
pub use config::{AttentionConfig, NormKind, NormPlacement, TransformerConfig};
pub use inputs::LayerInputs;
pub use key_values::KeyValues;
pub use layer::{TransformerLayer, transformer_layer};
pub use layer_norm_linear::{LayerNormLinear, layer_norm_linear};
pub use mlp::{LayerNormMlp, MlpInput, layer_norm_mlp};

use super::{LayerNorm, Linear};
