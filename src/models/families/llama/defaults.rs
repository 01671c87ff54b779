//! Defaults of transformers that depend on the `model_type`: norms, positions, windows and experts.

use crate::models::layers::RopeDefaults;

/// Added to the mean square in the norms.
pub(super) fn norm_eps(kind: &str) -> f64 {
    match kind {
        "mixtral" | "phi3" => 1e-5,
        _ => 1e-6,
    }
}

/// Tokens that the model was trained for.
pub(super) fn positions(kind: &str) -> usize {
    match kind {
        "mistral" | "mixtral" => 131_072,
        "qwen2" | "qwen3" | "qwen3_moe" => 32_768,
        "phi3" | "deepseek_v3" => 4096,
        "mistral4" => 1_048_576,
        _ => 2048,
    }
}

/// Rotary positions.
pub(super) fn rope(kind: &str) -> RopeDefaults {
    RopeDefaults {
        theta: if kind == "mixtral" { 1e6 } else { 1e4 },
        positions: positions(kind),
        original: (kind == "phi3").then_some(4096),
        // With latent attention it is a part with a size of its own.
        partial: matches!(kind, "phi3" | "deepseek_v2" | "deepseek_v3" | "mistral4"),
    }
}

/// The window of attention in families that have one.
pub(super) fn window(kind: &str) -> Option<usize> {
    match kind {
        "mistral" | "qwen2" | "qwen3" | "qwen3_moe" => Some(4096),
        _ => None,
    }
}

/// Experts of the DeepSeek family.
pub(super) struct Experts {
    /// `n_shared_experts`.
    pub(super) shared: usize,
    /// `first_k_dense_replace`.
    pub(super) dense: usize,
    /// `n_group`.
    pub(super) groups: usize,
    /// `topk_group`.
    pub(super) chosen: Option<usize>,
    /// `routed_scaling_factor`.
    pub(super) scaling: f64,
}

impl Experts {
    pub(super) fn of(kind: &str) -> Self {
        let (shared, dense, groups, chosen, scaling) = match kind {
            "deepseek_v3" => (1, 3, 8, Some(4), 2.5),
            "mistral4" => (1, 0, 1, Some(1), 1.),
            _ => (2, 0, 1, None, 1.),
        };
        Self {
            shared,
            dense,
            groups,
            chosen,
            scaling,
        }
    }
}
