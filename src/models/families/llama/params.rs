//! The configuration in Mistral's own `params.json`.

use super::config::{MAX_LAYERS, heads};
use super::{LlamaConfig, MlaConfig, MoeConfig, MoeNames, Routing};
use crate::models::error::Result;
use crate::models::files::Entries;
use crate::models::layers::{RopeConfig, RopeScaling};
use serde_json::Value;
use std::path::Path;

/// Tokens that Mistral's models are trained for, if the file does not say.
const POSITIONS: usize = 128_000;

impl LlamaConfig {
    /// Reads Mistral's `params.json`, the configuration beside `consolidated.safetensors`; `path` is for messages.
    ///
    /// # Errors
    /// [`Error::Config`](crate::models::Error::Config) naming the entry that is missing or unsupported.
    pub(crate) fn parse_params(path: impl AsRef<Path>, params: &Value) -> Result<Self> {
        let params = Entries::new(path.as_ref(), params);
        refuse_others(&params)?;
        let hidden_size = params.size("dim", None)?;
        let num_layers = params.size_up_to(MAX_LAYERS, "n_layers", None)?;
        let (num_heads, num_kv_heads) = heads(&params, "n_heads", "n_kv_heads")?;
        let mla = match params.get("qk_nope_head_dim") {
            None => None,
            Some(_) => Some(MlaConfig::parse_params(&params)?),
        };
        let (head_dim, rotated) = match &mla {
            Some(mla) => (mla.cached_dim(), mla.rotated_dim),
            None => {
                let head_dim = params.size("head_dim", (hidden_size / num_heads).max(1))?;
                (head_dim, head_dim)
            }
        };
        if !rotated.is_multiple_of(2) {
            let key = if mla.is_some() {
                "qk_rope_head_dim"
            } else {
                "head_dim"
            };
            return Err(params.error(key, "an even number"));
        }
        let intermediate_size = params.size("hidden_dim", None)?;
        let positions = params.size("max_seq_len", POSITIONS)?;
        let positions = params.size("max_position_embeddings", positions)?;
        Ok(Self {
            vocab_size: params.size("vocab_size", None)?,
            hidden_size,
            intermediate_size,
            num_layers,
            num_heads,
            num_kv_heads: if mla.is_some() {
                num_heads
            } else {
                num_kv_heads
            },
            head_dim,
            rms_norm_eps: params.positive("norm_eps", 1e-5)?,
            rope: rope(&params, rotated, positions)?,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            qk_norm: false,
            sliding_windows: windows(&params, num_layers)?,
            tie_word_embeddings: params.flag("tied_embeddings", false)?,
            max_position_embeddings: positions,
            eos_token_ids: vec![],
            moe: mixture(&params, intermediate_size, num_layers)?,
            mla,
            extra_layers: 0,
        })
    }
}

/// Rejects unsupported entries that would change what the model computes.
fn refuse_others(params: &Entries<'_>) -> Result<()> {
    params.only("ada_rms_norm_t_cond", Value::Null)?;
    // All of them belong to latent attention.
    if params.get("qk_nope_head_dim").is_none() {
        for key in [
            "q_lora_rank",
            "kv_lora_rank",
            "qk_rope_head_dim",
            "v_head_dim",
            "llama_4_scaling",
        ] {
            params.only(key, Value::Null)?;
        }
    }
    params.only("model_type", "transformer")?;
    params.only("activation", "silu")?;
    params.only("use_biases", false)?;
    params.only("causal", true)
}

fn rope(params: &Entries<'_>, head_dim: usize, positions: usize) -> Result<RopeConfig> {
    // Models without a window were trained on longer contexts.
    let theta = match params.get("sliding_window") {
        None => 1e6,
        Some(_) => 1e4,
    };
    let rope = RopeConfig::new(params.positive("rope_theta", theta)?, head_dim);
    let Some(yarn) = params.object("yarn") else {
        return Ok(rope);
    };
    let factor = yarn.positive("factor", None)?;
    let attention_factor = match yarn.flag("apply_scale", true)? {
        true if factor > 1. => 0.1 * factor.ln() + 1.,
        _ => 1.,
    };
    Ok(rope.with_scaling(RopeScaling::Yarn {
        factor,
        original: yarn.size("original_max_position_embeddings", positions)?,
        beta_fast: yarn.positive("beta", 32.)?,
        beta_slow: yarn.positive("alpha", 1.)?,
        attention_factor,
        truncate: true,
    }))
}

/// The window of each layer: one for all, or a repeated pattern.
fn windows(params: &Entries<'_>, num_layers: usize) -> Result<Vec<Option<usize>>> {
    let Some(Value::Array(pattern)) = params.get("sliding_window") else {
        let window = params.get("sliding_window");
        let window = window.map(|_| params.size("sliding_window", None));
        return Ok(vec![window.transpose()?; num_layers]);
    };
    let window = |value: &Value| match value {
        Value::Null => Some(None),
        value => {
            let window = u32::try_from(value.as_u64()?).ok()?;
            (window > 0).then_some(Some(window as usize))
        }
    };
    let pattern: Option<Vec<_>> = pattern.iter().map(window).collect();
    let pattern = pattern.filter(|pattern| !pattern.is_empty());
    let pattern = pattern.ok_or_else(|| {
        let expected = "a number of tokens, or a list of them and of nulls";
        params.error("sliding_window", expected)
    })?;
    Ok(pattern.into_iter().cycle().take(num_layers).collect())
}

fn mixture(
    params: &Entries<'_>,
    intermediate_size: usize,
    num_layers: usize,
) -> Result<Option<MoeConfig>> {
    let Some(moe) = params.object("moe") else {
        return Ok(None);
    };
    for (key, expected) in [
        ("num_expert_groups", 1),
        ("num_expert_groups_per_tok", 1),
        ("route_every_n", 1),
    ] {
        let is_other = |value: &Value| value.as_u64() != Some(0) && *value != expected;
        if moe.get(key).is_some_and(is_other) {
            return Err(moe.error(key, expected.to_string()));
        }
    }
    let num_experts = moe.size("num_experts", None)?;
    let dense = moe.count("first_k_dense_replace")?.unwrap_or(0);
    let shared = moe.count("num_shared_experts")?.unwrap_or(0);
    let expert_size = moe.size("expert_hidden_dim", intermediate_size)?;
    Ok(Some(MoeConfig {
        num_experts,
        experts_per_token: moe.size_up_to(num_experts, "num_experts_per_tok", None)?,
        intermediate_size: expert_size,
        normalize: true,
        routing: Routing {
            scaling: moe.positive("routed_scale", 1.)?,
            ..Routing::softmax()
        },
        shared_size: (shared > 0).then(|| expert_size.saturating_mul(shared)),
        names: MoeNames::Mixtral,
        dense_layers: (0..dense.min(num_layers)).collect(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn with(more: Value) -> Result<LlamaConfig> {
        let mut params =
            json!({ "dim": 64, "n_layers": 5, "n_heads": 4, "hidden_dim": 96, "vocab_size": 128 });
        for (key, value) in more.as_object().expect("an object") {
            params[key] = value.clone();
        }
        LlamaConfig::parse_params("params.json", &params)
    }

    #[test]
    fn every_entry_has_its_meaning() -> Result<()> {
        let plain = with(json!({}))?;
        assert_eq!((plain.num_kv_heads, plain.head_dim), (4, 16));
        assert_eq!(plain.rope, RopeConfig::new(1e6, 16));
        assert_eq!(plain.sliding_windows, [None; 5]);
        let windows = with(json!({ "sliding_window": [null, 8, 8] }))?.sliding_windows;
        assert_eq!(windows, [None, Some(8), Some(8), None, Some(8)]);
        let window = with(json!({ "sliding_window": 4096 }))?;
        assert_eq!(window.sliding_windows, [Some(4096); 5]);
        assert_eq!(window.rope.theta, 1e4);
        let moe = json!({ "num_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "num_shared_experts": 0 });
        let moe = with(json!({ "moe": moe }))?.moe.expect("a mixture");
        assert_eq!((moe.num_experts, moe.intermediate_size), (4, 96));
        assert_eq!(moe.dense_layers, [0]);
        let latent = json!({ "q_lora_rank": 8, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 12,
            "llama_4_scaling": { "beta": 0.1, "original_max_position_embeddings": 64 },
            "moe": { "num_experts": 4, "num_experts_per_tok": 1, "expert_hidden_dim": 8, "num_shared_experts": 2, "routed_scale": 2.5 } });
        let latent = with(latent)?;
        let mla = latent.mla.expect("latent attention");
        assert_eq!(
            (mla.q_rank, mla.softmax_scale, latent.rope.dim),
            (Some(8), 0.25, 4)
        );
        assert_eq!(mla.query_growth.map(|growth| growth.original), Some(64));
        let moe = latent.moe.expect("a mixture");
        assert_eq!((moe.shared_size, moe.routing.scaling), (Some(16), 2.5));
        let yarn = json!({ "factor": 16., "original_max_position_embeddings": 16384, "apply_scale": false, "beta": 32, "alpha": 1 });
        let yarn = with(json!({ "yarn": yarn }))?.rope.scaling;
        assert!(
            matches!(yarn, RopeScaling::Yarn { factor, original: 16384, attention_factor: 1., .. } if factor == 16.),
            "{yarn:?}"
        );
        Ok(())
    }

    #[test]
    fn unsupported_entries_are_refused_by_name() {
        for (more, key) in [
            (json!({ "dim": null }), "dim is missing"),
            (json!({ "n_kv_heads": 3 }), "n_kv_heads is 3"),
            (json!({ "head_dim": 7 }), "head_dim is 7"),
            (json!({ "kv_lora_rank": 512 }), "kv_lora_rank is 512"),
            (json!({ "llama_4_scaling": {} }), "llama_4_scaling is {}"),
            (json!({ "model_type": "mamba" }), "model_type is \"mamba\""),
            (json!({ "use_biases": true }), "use_biases is true"),
            (json!({ "sliding_window": [0] }), "sliding_window is [0]"),
            (
                json!({ "moe": { "num_experts": 2, "num_experts_per_tok": 3 } }),
                "moe.num_experts_per_tok is 3",
            ),
            (
                json!({ "moe": { "num_experts": 2, "num_experts_per_tok": 1, "num_expert_groups": 2 } }),
                "moe.num_expert_groups is 2",
            ),
            (
                json!({ "qk_nope_head_dim": 8 }),
                "qk_rope_head_dim is missing",
            ),
            (
                json!({ "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "yarn": { "factor": 4, "apply_scale": true } }),
                "yarn.apply_scale is true",
            ),
        ] {
            let error = with(more).expect_err(key).to_string();
            assert!(error.starts_with(&format!("params.json: {key}")), "{error}");
        }
    }
}
