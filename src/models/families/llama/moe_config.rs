//! The configuration of mixtures of experts.

use super::defaults::Experts;
use crate::models::error::Result;
use crate::models::files::Entries;

/// The experts of a mixture.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct MoeConfig {
    /// Experts in a layer.
    pub num_experts: usize,
    /// Experts that each token is routed to.
    pub experts_per_token: usize,
    /// Inner features of an expert.
    pub intermediate_size: usize,
    /// Whether the weights of a token's experts are normalized to sum to 1.
    pub normalize: bool,
    /// How a token's experts are chosen and weighted.
    pub routing: Routing,
    /// Inner features of the MLP that every token passes through beside its experts; None where there is none.
    pub shared_size: Option<usize>,
    /// How tensors are named.
    pub names: MoeNames,
    /// Layers that have a dense MLP instead.
    pub dense_layers: Vec<usize>,
}

/// Names of a mixture's tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MoeNames {
    /// `block_sparse_moe.gate`, `block_sparse_moe.experts.E.w1` (gate), `w3` (up), `w2` (down).
    Mixtral,
    /// `mlp.gate`, `mlp.experts.E.gate_proj`, `up_proj`, `down_proj`; `mlp.shared_experts`.
    Qwen,
}

/// How a token's experts are chosen and weighted.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Routing {
    /// From the router's logits to scores, which become the weights of experts.
    pub scores: RouterScores,
    /// If experts are in groups, from which groups they are chosen.
    pub groups: Option<ExpertGroups>,
    /// What the weights of experts are multiplied by, after they are normalized.
    pub scaling: f64,
}

impl Routing {
    /// Softmax, without groups or scaling.
    pub const fn softmax() -> Self {
        Self {
            scores: RouterScores::Softmax,
            groups: None,
            scaling: 1.,
        }
    }
}

/// The function from a router's logits to scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RouterScores {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each logit. Each expert has a bias, `gate.e_score_correction_bias`, which counts for the choice but not for the weight.
    Sigmoid,
}

/// Groups of experts. Only the experts of the best groups can be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExpertGroups {
    /// Groups, of equal sizes.
    pub count: usize,
    /// Groups that experts are chosen from.
    pub chosen: usize,
    /// How many of a group's largest scores make its own score: their sum.
    pub best: usize,
}

impl MoeConfig {
    pub(super) fn parse(
        config: &Entries<'_>,
        kind: &str,
        num_layers: usize,
    ) -> Result<Option<Self>> {
        // The defaults of transformers.
        let (names, experts, per_token) = match kind {
            "mixtral" => (MoeNames::Mixtral, 8, 2),
            "qwen3_moe" => (MoeNames::Qwen, 128, 8),
            "deepseek_v2" | "deepseek_v3" | "mistral4" => {
                return Self::deepseek(config, kind, num_layers).map(Some);
            }
            _ => return Ok(None),
        };
        let num_experts = num_experts(config, experts)?;
        let (intermediate, normalize, listed) = match names {
            MoeNames::Mixtral => ("intermediate_size", true, vec![]),
            MoeNames::Qwen => (
                "moe_intermediate_size",
                config.flag("norm_topk_prob", false)?,
                config.token_ids("mlp_only_layers")?,
            ),
        };
        let mut dense_layers: Vec<_> = listed.into_iter().map(|layer| layer as usize).collect();
        let step = config.size("decoder_sparse_step", 1)?;
        dense_layers.extend((0..num_layers).filter(|layer| (layer + 1) % step != 0));
        Ok(Some(Self {
            num_experts,
            experts_per_token: config.size_up_to(num_experts, "num_experts_per_tok", per_token)?,
            intermediate_size: config.size(intermediate, None)?,
            normalize,
            routing: Routing::softmax(),
            shared_size: None,
            names,
            dense_layers,
        }))
    }

    /// DeepSeek-V2 and V3, and Mistral 4.
    fn deepseek(config: &Entries<'_>, kind: &str, num_layers: usize) -> Result<Self> {
        let num_experts = config.size("n_routed_experts", None)?;
        let intermediate_size = config.size("moe_intermediate_size", None)?;
        let (is_v3, usual) = (kind == "deepseek_v3", Experts::of(kind));
        let scores = if is_v3 { "sigmoid" } else { "softmax" };
        config.only("scoring_func", scores)?;
        config.only("moe_layer_freq", 1)?;
        // The largest scores of a group that count: V3 and Mistral add two.
        let best = match kind {
            "deepseek_v2" => match config.text("topk_method", "greedy")? {
                "greedy" => None,
                "group_limited_greedy" => Some(1),
                _ => return Err(config.error("topk_method", "greedy or group_limited_greedy")),
            },
            _ => {
                config.only("topk_method", if is_v3 { "noaux_tc" } else { "greedy" })?;
                Some(2)
            }
        };
        let groups = match best {
            None => None,
            Some(best) => groups(config, num_experts, best, &usual)?,
        };
        let normalize = config.flag("norm_topk_prob", kind != "deepseek_v2")?;
        if kind == "deepseek_v2" && normalize {
            // Implementations disagree about what it means there.
            return Err(config.error("norm_topk_prob", "false"));
        }
        let count = |key: &str, usual: usize| match config.is_absent(key) {
            true => Ok(usual),
            false => config.count(key).map(Option::unwrap_or_default),
        };
        let shared = count("n_shared_experts", usual.shared)?;
        let dense = count("first_k_dense_replace", usual.dense)?;
        Ok(Self {
            num_experts,
            experts_per_token: config.size_up_to(num_experts, "num_experts_per_tok", None)?,
            intermediate_size,
            normalize,
            routing: Routing {
                scores: match is_v3 {
                    true => RouterScores::Sigmoid,
                    false => RouterScores::Softmax,
                },
                groups,
                scaling: config.positive("routed_scaling_factor", usual.scaling)?,
            },
            shared_size: (shared > 0).then(|| intermediate_size.saturating_mul(shared)),
            names: MoeNames::Qwen,
            dense_layers: (0..dense.min(num_layers)).collect(),
        })
    }
}

/// The groups of `n_group` and `topk_group`; None for a single one.
fn groups(
    config: &Entries<'_>,
    num_experts: usize,
    best: usize,
    usual: &Experts,
) -> Result<Option<ExpertGroups>> {
    let count = match config.is_absent("n_group") {
        true => usual.groups,
        false => config.size("n_group", 1)?,
    };
    if count == 1 {
        return Ok(None);
    }
    if !num_experts.is_multiple_of(count) || num_experts / count < best {
        let expected =
            format!("a divisor of the {num_experts} experts that leaves {best} or more to a group");
        return Err(config.error("n_group", expected));
    }
    let chosen = config.size_up_to(count, "topk_group", usual.chosen)?;
    Ok(Some(ExpertGroups {
        count,
        chosen,
        best,
    }))
}

/// transformers 5 writes `num_local_experts` for every mixture; earlier versions wrote `num_experts` for Qwen.
fn num_experts(config: &Entries<'_>, default: usize) -> Result<usize> {
    let (new, old) = ("num_local_experts", "num_experts");
    let count = config.size(old, config.size(new, default)?)?;
    if config.size(new, count)? != count {
        return Err(config.error(new, format!("{count}, as {old} says")));
    }
    Ok(count)
}
