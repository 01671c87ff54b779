//! Mistral's own files: `params.json` and `consolidated.safetensors`.
//!
//! Names become those of transformers, and so does the order of the rows of queries and keys: Mistral's files alternate the two halves
//! that a rotation turns, those of transformers put one after the other.

use super::compressed_tensors;
use crate::error::Result;
use crate::load::at::At;
use crate::load::family::{Declared, Family, Order};
use crate::load::family_name::FamilyName;
use crate::scheme::InputScheme;
use serde_json::json;

impl FamilyName {
    /// Mistral's own files.
    pub const MISTRAL_NATIVE: Self = Self::new("Mistral native");
}

/// Modules in a layer: Mistral's names and those of transformers.
const MODULES: [(&str, &str); 22] = [
    ("attention.wq", "self_attn.q_proj"),
    ("attention.wk", "self_attn.k_proj"),
    ("attention.wv", "self_attn.v_proj"),
    ("attention.wo", "self_attn.o_proj"),
    ("attention.wq_a", "self_attn.q_a_proj"),
    ("attention.q_a_norm", "self_attn.q_a_layernorm"),
    ("attention.wq_b", "self_attn.q_b_proj"),
    ("attention.wkv_a_with_mqa", "self_attn.kv_a_proj_with_mqa"),
    ("attention.kv_a_norm", "self_attn.kv_a_layernorm"),
    ("attention.wkv_b", "self_attn.kv_b_proj"),
    ("attention", "self_attn"),
    ("attention_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("feed_forward.w1", "mlp.gate_proj"),
    ("feed_forward.w2", "mlp.down_proj"),
    ("feed_forward.w3", "mlp.up_proj"),
    ("feed_forward.experts", "block_sparse_moe.experts"),
    ("feed_forward.gate", "block_sparse_moe.gate"),
    ("shared_experts", "block_sparse_moe.shared_experts"),
    ("experts", "block_sparse_moe.experts"),
    ("gate", "block_sparse_moe.gate"),
    ("feed_forward", "mlp"),
];

/// Modules outside of the layers.
const OUTSIDE: [(&str, &str); 3] = [
    ("tok_embeddings", "model.embed_tokens"),
    ("norm", "model.norm"),
    ("output", "lm_head"),
];

/// The family that `params.json` describes; `at` is the whole file.
pub(in crate::load) fn parse(at: &At<'_>) -> Result<Family> {
    let heads = heads(at, "n_heads", "n_kv_heads")?;
    let quantization = at.get("quantization");
    let method = quantization.get("quant_method");
    if !method.is_null() {
        method.must_be(json!(["compressed-tensors"]))?;
        let Family {
            packed_weights,
            global_scales,
            descriptions,
            layer,
            ..
        } = compressed_tensors::parse(&quantization)?;
        return Ok(Family {
            packed_weights,
            global_scales,
            descriptions,
            ..family(at, heads, move |path: &str| layer(&native(path)))
        });
    }
    let declared = match quantization.is_null() {
        true => None,
        false => {
            quantization
                .get("qformat_weight")
                .must_be(json!(["fp8_e4m3"]))?;
            let inputs = quantization.get("qscheme_act");
            inputs.must_be(json!([null, "TENSOR", "NO_SCALES"]))?;
            let input = match inputs.value == "NO_SCALES" {
                true => InputScheme::per_token(),
                false => InputScheme::Static(()),
            };
            Some(Declared::new(None, input))
        }
    };
    Ok(family(at, heads, move |_| Ok(declared)))
}

/// The family that `config.json` describes where there is no `params.json`; `at` is the whole file. `has_scales`: whether there are
/// `qscale_weight`s. Inputs are static where the file has scales for them.
pub(in crate::load) fn of_config(at: &At<'_>, has_scales: bool) -> Result<Family> {
    let text = at.get("text_config");
    let at = if text.is_null() { at } else { &text };
    let heads = heads(at, "num_attention_heads", "num_key_value_heads")?;
    let declared = has_scales.then(Declared::default);
    Ok(family(at, heads, move |_| Ok(declared)))
}

/// Heads of queries, and of keys and values.
fn heads(at: &At<'_>, all: &str, kv: &str) -> Result<(usize, usize)> {
    let heads = at.get(all).count()?;
    let kv = at.get(kv);
    let kv_heads = if kv.is_null() { heads } else { kv.count()? };
    Ok((heads, kv_heads))
}

fn family(
    at: &At<'_>,
    (heads, kv_heads): (usize, usize),
    layer: impl Fn(&str) -> Result<Option<Declared>> + Send + Sync + 'static,
) -> Family {
    let rename = move |name: &str| {
        let heads = match in_layer(name, "layers.") {
            Some((_, rest)) if rest.starts_with("attention.wq.") => Some(heads),
            Some((_, rest)) if rest.starts_with("attention.wk.") => Some(kv_heads),
            _ => None,
        };
        let order = match heads {
            Some(heads) if !name.ends_with("_act") && !name.ends_with("input_scale") => {
                Order::Rotary { heads }
            }
            _ => Order::AsStored,
        };
        (canonical(name), order)
    };
    Family {
        weight_scales: &["qscale_weight", "weight_scale"],
        input_scales: &["qscale_act", "input_scale"],
        rename: Box::new(rename),
        ..Family::new(FamilyName::MISTRAL_NATIVE, Some(at.path), layer)
    }
}

/// The number of a layer and what follows it.
fn in_layer<'a>(name: &'a str, prefix: &str) -> Option<(&'a str, &'a str)> {
    name.strip_prefix(prefix)?.split_once('.')
}

fn canonical(name: &str) -> String {
    translated(name, ("layers.", "model.layers."), |pair| pair)
}

/// The inverse of [`canonical`].
fn native(path: &str) -> String {
    let swap = |(ours, theirs)| (theirs, ours);
    translated(path, ("model.layers.", "layers."), swap)
}

type Pair = (&'static str, &'static str);

/// Replaces the prefix of a name's layer and the module after it, or the module of a name outside of layers. `direction` turns a pair of
/// the tables into the old and the new module.
fn translated(name: &str, (from, to): (&str, &str), direction: fn(Pair) -> Pair) -> String {
    let replaced = |name: &str, pairs: &[Pair]| {
        let replaced = pairs.iter().find_map(|pair| {
            let (from, to) = direction(*pair);
            let rest = name.strip_prefix(from)?;
            (rest.is_empty() || rest.starts_with('.')).then(|| format!("{to}{rest}"))
        });
        replaced.unwrap_or_else(|| name.to_string())
    };
    match in_layer(name, from) {
        Some((layer, rest)) => format!("{to}{layer}.{}", replaced(rest, &MODULES)),
        None => replaced(name, &OUTSIDE),
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
            (
                "layers.3.attention.wkv_a_with_mqa.weight",
                "model.layers.3.self_attn.kv_a_proj_with_mqa.weight",
            ),
            (
                "layers.3.shared_experts.w2.qscale_weight",
                "model.layers.3.block_sparse_moe.shared_experts.w2.qscale_weight",
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
