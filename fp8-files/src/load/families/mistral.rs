//! Mistral's own files: `params.json` and `consolidated.safetensors`.
//!
//! Names become those of transformers, and so does the order of the rows of queries and keys: here the two halves that a rotation
//! turns alternate, there they follow each other.

use super::CompressedTensors;
use crate::error::Result;
use crate::load::family::{At, Family, Order};
use crate::load::family_name::FamilyName;
use crate::scheme::{InputScheme, LayerScheme};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Parts of names within a layer: Mistral's and those of transformers.
const MODULES: [(&str, &str); 15] = [
    ("attention.wq", "self_attn.q_proj"),
    ("attention.wk", "self_attn.k_proj"),
    ("attention.wv", "self_attn.v_proj"),
    ("attention.wo", "self_attn.o_proj"),
    ("attention", "self_attn"),
    ("attention_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("feed_forward.w1", "mlp.gate_proj"),
    ("feed_forward.w2", "mlp.down_proj"),
    ("feed_forward.w3", "mlp.up_proj"),
    ("feed_forward.experts", "block_sparse_moe.experts"),
    ("feed_forward.gate", "block_sparse_moe.gate"),
    ("experts", "block_sparse_moe.experts"),
    ("gate", "block_sparse_moe.gate"),
    ("feed_forward", "mlp"),
];

/// Names outside of the layers.
const OUTSIDE: [(&str, &str); 3] = [
    ("tok_embeddings", "model.embed_tokens"),
    ("norm", "model.norm"),
    ("output", "lm_head"),
];

#[derive(Debug)]
pub(in crate::load) struct Mistral {
    path: PathBuf,
    heads: usize,
    kv_heads: usize,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    HighPrecision,
    Fp8(LayerScheme),
    Compressed(CompressedTensors),
}

impl Mistral {
    /// `at` is the whole of `params.json`.
    pub(in crate::load) fn parse(at: &At<'_>) -> Result<Self> {
        let heads = at.get("n_heads").count()?;
        let kv_heads = match at.get("n_kv_heads") {
            at if at.is_null() => heads,
            at => at.count()?,
        };
        let quantization = at.get("quantization");
        let kind = if quantization.is_null() {
            Kind::HighPrecision
        } else if quantization.get("quant_method").is_null() {
            quantization
                .get("qformat_weight")
                .must_be(&[json!("fp8_e4m3")])?;
            let inputs = quantization.get("qscheme_act");
            inputs.must_be(&[Value::Null, json!("TENSOR"), json!("NO_SCALES")])?;
            let input = match inputs.value == "NO_SCALES" {
                true => InputScheme::PerToken,
                false => InputScheme::Static,
            };
            Kind::Fp8(LayerScheme {
                input: Some(input),
                ..LayerScheme::default()
            })
        } else {
            let method = quantization.get("quant_method");
            method.must_be(&[json!("compressed-tensors")])?;
            Kind::Compressed(CompressedTensors::parse(&quantization)?)
        };
        Ok(Self {
            path: at.file(),
            heads,
            kv_heads,
            kind,
        })
    }

    /// `at` is the whole of `config.json`, beside which there is no `params.json`; `has_scales`: whether there are
    /// `qscale_weight`s. Inputs are static where there are scales of them.
    pub(in crate::load) fn of_config(at: &At<'_>, has_scales: bool) -> Result<Self> {
        let at = match at.get("text_config") {
            text if text.is_null() => at.clone(),
            text => text,
        };
        let heads = at.get("num_attention_heads").count()?;
        let kv_heads = match at.get("num_key_value_heads") {
            at if at.is_null() => heads,
            at => at.count()?,
        };
        Ok(Self {
            path: at.file(),
            heads,
            kv_heads,
            kind: match has_scales {
                true => Kind::Fp8(LayerScheme::default()),
                false => Kind::HighPrecision,
            },
        })
    }
}

/// A name with its beginning replaced, up to the border of a part; None if it begins otherwise.
fn replaced(name: &str, from: &str, to: &str) -> Option<String> {
    let rest = name.strip_prefix(from)?;
    (rest.is_empty() || rest.starts_with('.')).then(|| format!("{to}{rest}"))
}

/// The number of a layer and what follows it.
fn in_layer<'a>(name: &'a str, prefix: &str) -> Option<(&'a str, &'a str)> {
    name.strip_prefix(prefix)?.split_once('.')
}

fn canonical(name: &str) -> String {
    if let Some((layer, rest)) = in_layer(name, "layers.") {
        let mut modules = MODULES.iter();
        let rest = modules
            .find_map(|(ours, theirs)| replaced(rest, ours, theirs))
            .unwrap_or_else(|| rest.to_string());
        return format!("model.layers.{layer}.{rest}");
    }
    let mut outside = OUTSIDE.iter();
    outside
        .find_map(|(ours, theirs)| replaced(name, ours, theirs))
        .unwrap_or_else(|| name.to_string())
}

/// The inverse of [`canonical`].
fn native(path: &str) -> String {
    if let Some((layer, rest)) = in_layer(path, "model.layers.") {
        let mut modules = MODULES.iter();
        let rest = modules
            .find_map(|(ours, theirs)| replaced(rest, theirs, ours))
            .unwrap_or_else(|| rest.to_string());
        return format!("layers.{layer}.{rest}");
    }
    let mut outside = OUTSIDE.iter();
    outside
        .find_map(|(ours, theirs)| replaced(path, theirs, ours))
        .unwrap_or_else(|| path.to_string())
}

impl Family for Mistral {
    fn name(&self) -> FamilyName {
        FamilyName::MistralNative
    }

    fn layer(&self, path: &str) -> Result<Option<LayerScheme>> {
        match &self.kind {
            Kind::HighPrecision => Ok(None),
            Kind::Fp8(scheme) => Ok(Some(*scheme)),
            Kind::Compressed(inner) => match inner.layer(&native(path))? {
                Some(scheme) => Ok(Some(scheme)),
                None => Ok(None),
            },
        }
    }

    fn weight_scale_names(&self) -> &'static [&'static str] {
        &["qscale_weight", "weight_scale"]
    }

    fn input_scale_names(&self) -> &'static [&'static str] {
        &["qscale_act", "input_scale"]
    }

    fn rename(&self, name: &str) -> (String, Order) {
        let heads = match in_layer(name, "layers.") {
            Some((_, rest)) if rest.starts_with("attention.wq.") => Some(self.heads),
            Some((_, rest)) if rest.starts_with("attention.wk.") => Some(self.kv_heads),
            _ => None,
        };
        let order = match heads {
            Some(heads) if !name.ends_with("_act") && !name.ends_with("input_scale") => {
                Order::Rotary { heads }
            }
            _ => Order::AsStored,
        };
        (canonical(name), order)
    }

    fn source(&self) -> Option<&Path> {
        Some(&self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_both_ways() {
        for (ours, theirs) in [
            (
                "layers.3.attention.wq.weight",
                "model.layers.3.self_attn.q_proj.weight",
            ),
            (
                "layers.3.attention_norm.weight",
                "model.layers.3.input_layernorm.weight",
            ),
            (
                "layers.3.feed_forward.w3.qscale_act",
                "model.layers.3.mlp.up_proj.qscale_act",
            ),
            (
                "layers.3.feed_forward.experts.7.w1.weight",
                "model.layers.3.block_sparse_moe.experts.7.w1.weight",
            ),
            (
                "layers.3.attention.k_fake_quantizer.qscale_act",
                "model.layers.3.self_attn.k_fake_quantizer.qscale_act",
            ),
            ("tok_embeddings.weight", "model.embed_tokens.weight"),
            ("norm.weight", "model.norm.weight"),
            ("output.weight", "lm_head.weight"),
            (
                "vision_encoder.ln_pre.weight",
                "vision_encoder.ln_pre.weight",
            ),
        ] {
            assert_eq!(canonical(ours), theirs);
            assert_eq!(native(theirs), ours);
        }
    }
}
