//! llama.cpp's names of a model's tensors.

use crate::models::files::gguf::names::{PARTS, WHOLE};

/// An architecture of llama.cpp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Architecture {
    Llama,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    Phi3,
    Bert,
}

impl Architecture {
    /// By the `model_type` of a configuration that has been read.
    pub(super) fn of(model_type: &str) -> Self {
        match model_type {
            "qwen2" => Self::Qwen2,
            "qwen3" => Self::Qwen3,
            "qwen3_moe" => Self::Qwen3Moe,
            "phi3" => Self::Phi3,
            "bert" => Self::Bert,
            _ => Self::Llama,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Qwen3Moe => "qwen3moe",
            Self::Phi3 => "phi3",
            Self::Bert => "bert",
        }
    }
}

/// Where a tensor goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Target {
    /// A tensor of its own.
    Tensor(String),
    /// One expert's part of a tensor.
    Expert(String, usize),
    /// Nowhere: llama.cpp computes without it.
    Nowhere,
}

/// Parts of Phi-3's layers that are fused: their names in the file and in transformers.
const FUSED: [(&str, &str); 2] = [
    ("attn_qkv", "self_attn.qkv_proj"),
    ("ffn_up", "mlp.gate_up_proj"),
];

/// The projections of an expert: the name in the file, and its names in transformers.
const EXPERTS: [(&str, [&str; 2]); 3] = [
    ("ffn_gate_exps", ["gate_proj", "w1"]),
    ("ffn_up_exps", ["up_proj", "w3"]),
    ("ffn_down_exps", ["down_proj", "w2"]),
];

/// The modules that hold experts and their router.
const MIXTURES: [&str; 2] = ["mlp", "block_sparse_moe"];

/// Scales of FP8 caches and FP8 attention, and tables that every program computes.
const DROPPED: [&str; 5] = [
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".prob_output_scale",
    ".rotary_emb.inv_freq",
];

/// The layer's number and the rest of the name.
fn in_layer<'a>(name: &'a str, list: &str) -> Option<(usize, &'a str)> {
    let (layer, rest) = name.strip_prefix(list)?.split_once('.')?;
    Some((layer.parse().ok()?, rest))
}

/// Translates a name of transformers; None if no tensor of the architecture has it.
pub(super) fn target(architecture: Architecture, name: &str) -> Option<Target> {
    if architecture == Architecture::Bert {
        return bert(name.strip_prefix("bert.").unwrap_or(name));
    }
    if let Some((stored, _)) = WHOLE.iter().find(|(_, target)| *target == name) {
        return Some(Target::Tensor((*stored).to_string()));
    }
    let (layer, rest) = in_layer(name, "model.layers.")?;
    if DROPPED.iter().any(|end| name.ends_with(end)) {
        return Some(Target::Nowhere);
    }
    let (module, kind) = rest.rsplit_once('.')?;
    if let Some(inner) = MIXTURES.iter().find_map(|m| module.strip_prefix(m)) {
        if inner == ".gate" && kind == "weight" {
            return Some(Target::Tensor(format!("blk.{layer}.ffn_gate_inp.weight")));
        }
        if let Some((expert, projection)) = in_layer(inner, ".experts.") {
            let mut all = EXPERTS.iter();
            let (stored, _) = all.find(|(_, names)| names.contains(&projection))?;
            let target = format!("blk.{layer}.{stored}.weight");
            return (kind == "weight").then_some(Target::Expert(target, expert));
        }
    }
    let fused = FUSED.iter().filter(|_| architecture == Architecture::Phi3);
    let fused = fused.map(|(stored, target)| (*stored, *target, false));
    let mut parts = PARTS.into_iter().chain(fused);
    let (stored, _, has_bias) = parts.find(|(_, target, _)| *target == module)?;
    let fits = kind == "weight" || (kind == "bias" && has_bias);
    fits.then(|| Target::Tensor(format!("blk.{layer}.{stored}.{kind}")))
}

/// Tensors of BERT outside of layers: their names in the file and in transformers.
const BERT: [(&str, &str); 5] = [
    ("token_embd.weight", "embeddings.word_embeddings.weight"),
    (
        "position_embd.weight",
        "embeddings.position_embeddings.weight",
    ),
    (
        "token_types.weight",
        "embeddings.token_type_embeddings.weight",
    ),
    ("token_embd_norm.weight", "embeddings.LayerNorm.weight"),
    ("token_embd_norm.bias", "embeddings.LayerNorm.bias"),
];

/// Parts of BERT's layers.
const BERT_PARTS: [(&str, &str); 8] = [
    ("attn_q", "attention.self.query"),
    ("attn_k", "attention.self.key"),
    ("attn_v", "attention.self.value"),
    ("attn_output", "attention.output.dense"),
    ("attn_output_norm", "attention.output.LayerNorm"),
    ("ffn_up", "intermediate.dense"),
    ("ffn_down", "output.dense"),
    ("layer_output_norm", "output.LayerNorm"),
];

fn bert(name: &str) -> Option<Target> {
    if let Some((stored, _)) = BERT.iter().find(|(_, target)| *target == name) {
        return Some(Target::Tensor((*stored).to_string()));
    }
    // The pooler and the heads of pretraining, which embeddings do not use.
    let unused = ["pooler.", "cls.predictions.", "cls.seq_relationship."];
    if name == "embeddings.position_ids" || unused.iter().any(|part| name.starts_with(part)) {
        return Some(Target::Nowhere);
    }
    let (layer, rest) = in_layer(name, "encoder.layer.")?;
    let (module, kind) = rest.rsplit_once('.')?;
    let (stored, _) = BERT_PARTS.iter().find(|(_, target)| *target == module)?;
    let fits = matches!(kind, "weight" | "bias");
    fits.then(|| Target::Tensor(format!("blk.{layer}.{stored}.{kind}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_those_of_llama_cpp() {
        use Architecture::{Bert, Llama, Phi3, Qwen3Moe};
        let tensor = |name: &str| Some(Target::Tensor(name.to_string()));
        let expert = |name: &str, expert| Some(Target::Expert(name.to_string(), expert));
        for (architecture, name, expected) in [
            (
                Llama,
                "model.layers.3.self_attn.q_proj.bias",
                tensor("blk.3.attn_q.bias"),
            ),
            (Llama, "lm_head.weight", tensor("output.weight")),
            (
                Llama,
                "model.layers.0.block_sparse_moe.gate.weight",
                tensor("blk.0.ffn_gate_inp.weight"),
            ),
            (
                Llama,
                "model.layers.0.block_sparse_moe.experts.7.w2.weight",
                expert("blk.0.ffn_down_exps.weight", 7),
            ),
            (
                Qwen3Moe,
                "model.layers.12.mlp.experts.11.up_proj.weight",
                expert("blk.12.ffn_up_exps.weight", 11),
            ),
            (
                Qwen3Moe,
                "model.layers.1.mlp.gate_proj.weight",
                tensor("blk.1.ffn_gate.weight"),
            ),
            (
                Phi3,
                "model.layers.1.mlp.gate_up_proj.weight",
                tensor("blk.1.ffn_up.weight"),
            ),
            (Llama, "model.layers.1.mlp.gate_up_proj.weight", None),
            (
                Llama,
                "model.layers.1.self_attn.k_scale",
                Some(Target::Nowhere),
            ),
            (Llama, "model.layers.1.input_layernorm.bias", None),
            (Llama, "model.vision.weight", None),
            (
                Bert,
                "bert.encoder.layer.5.output.dense.bias",
                tensor("blk.5.ffn_down.bias"),
            ),
            (
                Bert,
                "encoder.layer.5.attention.output.LayerNorm.weight",
                tensor("blk.5.attn_output_norm.weight"),
            ),
            (Bert, "pooler.dense.weight", Some(Target::Nowhere)),
            (Bert, "classifier.weight", None),
        ] {
            assert_eq!(target(architecture, name), expected, "{name}");
        }
    }
}
