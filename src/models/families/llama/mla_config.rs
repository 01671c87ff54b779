//! The configuration of multi-head latent attention.

use crate::models::error::Result;
use crate::models::files::Entries;
use crate::models::layers::read_rope;
use candle_core::Tensor;

/// Latent attention (DeepSeek-V2, V3; Mistral 4). Each head has features without and with a rotary position; the key of the latter is one
/// for all heads.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct MlaConfig {
    /// Features between the two projections to queries; None where there is one projection.
    pub q_rank: Option<usize>,
    /// Features between the two projections to keys and values.
    pub kv_rank: usize,
    /// Features of a head's queries and keys without position.
    pub plain_dim: usize,
    /// Features of a head's queries, and of all keys, that are rotated.
    pub rotated_dim: usize,
    /// Features of a head's values.
    pub v_dim: usize,
    /// What products of queries and keys are multiplied by.
    pub softmax_scale: f64,
    /// Whether the pairs that rotate are neighbours, rather than one from each half.
    pub interleaved: bool,
    /// How queries grow with their position; None where they do not.
    pub query_growth: Option<QueryGrowth>,
}

/// Queries are multiplied by `1 + beta * ln(1 + floor(position / original))` (Llama 4, Mistral 4).
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct QueryGrowth {
    /// How much they grow.
    pub beta: f64,
    /// Up to this position they do not.
    pub original: usize,
}

impl QueryGrowth {
    /// The factors for the tokens of `q`, `[batch, heads, tokens, head_dim]`, from position `first`; `[tokens, 1]`.
    pub(super) fn factors(self, first: usize, q: &Tensor) -> Result<Tensor> {
        let tokens = q.dim(2)?;
        let factor = |position: usize| {
            let periods = (position / self.original) as f64;
            (1. + self.beta * (1. + periods).ln()) as f32
        };
        let factors: Vec<f32> = (first..first + tokens).map(factor).collect();
        let factors = Tensor::from_vec(factors, (tokens, 1), q.device())?;
        Ok(factors.to_dtype(q.dtype())?)
    }
}

impl MlaConfig {
    /// Reads a `config.json` of transformers, whose `model_type` is `kind`.
    pub(super) fn parse(config: &Entries<'_>, kind: &str) -> Result<Self> {
        let q_rank = match config.get("q_lora_rank") {
            None => None,
            Some(_) => Some(config.size("q_lora_rank", None)?),
        };
        let plain_dim = config.size("qk_nope_head_dim", None)?;
        let rotated_dim = config.size("qk_rope_head_dim", None)?;
        let scale = 1. / ((plain_dim + rotated_dim) as f64).sqrt();
        let (softmax_scale, query_growth) = read_rope(config, |rope| match rope {
            Some(rope) => scores(rope, kind, scale),
            None => Ok((scale, None)),
        })?;
        Ok(Self {
            q_rank,
            kv_rank: config.size("kv_lora_rank", None)?,
            plain_dim,
            rotated_dim,
            v_dim: config.size("v_head_dim", None)?,
            softmax_scale,
            interleaved: kind == "deepseek_v2" || config.flag("rope_interleave", true)?,
            query_growth,
        })
    }

    /// Reads Mistral's `params.json`.
    pub(super) fn parse_params(params: &Entries<'_>) -> Result<Self> {
        let plain_dim = params.size("qk_nope_head_dim", None)?;
        let rotated_dim = params.size("qk_rope_head_dim", None)?;
        let q_rank = params.get("q_lora_rank");
        let q_rank = q_rank.map(|_| params.size("q_lora_rank", None));
        // What it would do to scores is not documented, and no published model has it.
        if let Some(yarn) = params.object("yarn")
            && yarn.flag("apply_scale", true)?
        {
            return Err(yarn.error("apply_scale", "false with latent attention"));
        }
        let growth = params.object("llama_4_scaling");
        let growth = growth.map(|growth| -> Result<QueryGrowth> {
            Ok(QueryGrowth {
                beta: growth.positive("beta", None)?,
                original: growth.size("original_max_position_embeddings", None)?,
            })
        });
        Ok(Self {
            kv_rank: params.size("kv_lora_rank", None)?,
            q_rank: q_rank.transpose()?,
            plain_dim,
            rotated_dim,
            v_dim: params.size("v_head_dim", None)?,
            softmax_scale: 1. / ((plain_dim + rotated_dim) as f64).sqrt(),
            interleaved: true,
            query_growth: growth.transpose()?,
        })
    }

    /// Features of a head that a cache of keys and values needs.
    pub(super) fn cached_dim(&self) -> usize {
        (self.plain_dim + self.rotated_dim).max(self.v_dim)
    }
}

/// The scale of scores under these rotary positions, `scale` by itself, and the growth of queries.
fn scores(rope: &Entries<'_>, kind: &str, scale: f64) -> Result<(f64, Option<QueryGrowth>)> {
    let key = match rope.get("rope_type") {
        Some(_) => "rope_type",
        None => "type",
    };
    let is_scaled = rope.text(key, "default")? != "default";
    let temperature = match is_scaled && rope.get("mscale_all_dim").is_some() {
        true => {
            let factor = rope.positive("factor", None)?;
            1. + 0.1 * rope.positive("mscale_all_dim", None)? * factor.ln().max(0.)
        }
        false => 1.,
    };
    let growth = match kind == "mistral4" && rope.get("llama_4_scaling_beta").is_some() {
        true => Some(QueryGrowth {
            beta: rope.positive("llama_4_scaling_beta", None)?,
            original: rope.size("original_max_position_embeddings", None)?,
        }),
        false => None,
    };
    Ok((scale * (temperature * temperature), growth))
}
