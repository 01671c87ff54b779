//! Names of tensors in GGUF files, and their names in transformers.

use super::GgufError;
use candle_core::Tensor;
use std::path::Path;

/// A supported architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Architecture {
    Llama,
    Qwen2,
    Qwen3,
}

impl Architecture {
    pub(super) fn parse(name: &str, path: &Path) -> Result<Self, GgufError> {
        match name {
            // llama.cpp writes Mistral's models as `llama`; other tools name them.
            "llama" | "mistral" => Ok(Self::Llama),
            "qwen2" => Ok(Self::Qwen2),
            "qwen3" => Ok(Self::Qwen3),
            _ => Err(GgufError::UnsupportedArchitecture {
                path: path.to_path_buf(),
                architecture: name.to_string(),
            }),
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    /// Whether the rows of a tensor, named as in transformers, have another order in the file: Llama's files store queries and keys for
    /// rotary positions over neighbouring elements; transformers rotates the two halves of a head.
    pub(super) fn permutes(self, name: &str) -> bool {
        self == Self::Llama && (name.contains(".q_proj.") || name.contains(".k_proj."))
    }
}

/// The parts of a layer: their names in the file and in transformers, and whether they may have a bias.
pub(crate) const PARTS: [(&str, &str, bool); 11] = [
    ("attn_norm", "input_layernorm", false),
    ("attn_q", "self_attn.q_proj", true),
    ("attn_k", "self_attn.k_proj", true),
    ("attn_v", "self_attn.v_proj", true),
    ("attn_output", "self_attn.o_proj", true),
    ("attn_q_norm", "self_attn.q_norm", false),
    ("attn_k_norm", "self_attn.k_norm", false),
    ("ffn_norm", "post_attention_layernorm", false),
    ("ffn_gate", "mlp.gate_proj", true),
    ("ffn_up", "mlp.up_proj", true),
    ("ffn_down", "mlp.down_proj", true),
];

/// The tensors outside of layers: their names in the file and in transformers.
pub(crate) const WHOLE: [(&str, &str); 3] = [
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
];

/// Parts of a layer that must have a weight.
pub(super) const LAYER_PARTS: [&str; 9] = [
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
];

/// Translates a name of the file; `None` for tables that are part of the configuration, not weights.
pub(super) fn target(
    name: &str,
    architecture: Architecture,
    path: &Path,
) -> Result<Option<String>, GgufError> {
    let unknown = || GgufError::UnknownTensor {
        path: path.to_path_buf(),
        tensor: name.to_string(),
        architecture: architecture.name(),
    };
    if let Some((_, target)) = WHOLE.iter().find(|(stored, _)| *stored == name) {
        return Ok(Some((*target).to_string()));
    }
    if name == "rope_freqs.weight" {
        return Ok(None);
    }
    let block = name.strip_prefix("blk.").and_then(|rest| {
        let (layer, rest) = rest.split_once('.')?;
        let (part, kind) = rest.rsplit_once('.')?;
        Some((layer.parse::<usize>().ok()?, part, kind))
    });
    let (layer, part, kind) = block.ok_or_else(unknown)?;
    let known = PARTS.iter().find(|(stored, ..)| *stored == part);
    let (_, module, has_bias) = *known.ok_or_else(unknown)?;
    // Qwen3 alone normalizes queries and keys.
    if matches!(part, "attn_q_norm" | "attn_k_norm") && architecture != Architecture::Qwen3 {
        return Err(unknown());
    }
    if kind != "weight" && !(kind == "bias" && has_bias) {
        return Err(unknown());
    }
    Ok(Some(format!("model.layers.{layer}.{module}.{kind}")))
}

/// Undoes llama.cpp's permutation of the rows of queries and keys: within a head, row `2 i + half` of the file is row
/// `half * head_dim / 2 + i` in transformers. Works for weights `[heads * head_dim, in]` and biases `[heads * head_dim]`.
pub(super) fn unpermute(tensor: &Tensor, heads: usize) -> candle_core::Result<Tensor> {
    let dims = tensor.dims().to_vec();
    let half = dims[0] / heads / 2;
    tensor
        .reshape((heads, half, 2, ()))?
        .transpose(1, 2)?
        .contiguous()?
        .reshape(dims)
}

/// The inverse of [`unpermute`].
pub(crate) fn permute(tensor: &Tensor, heads: usize) -> candle_core::Result<Tensor> {
    let dims = tensor.dims().to_vec();
    let half = dims[0] / heads / 2;
    tensor
        .reshape((heads, 2, half, ()))?
        .transpose(1, 2)?
        .contiguous()?
        .reshape(dims)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn names_become_those_of_transformers() -> Result<(), GgufError> {
        let path = Path::new("m.gguf");
        let name = |name, architecture| target(name, architecture, path);
        let q = name("blk.3.attn_q.bias", Architecture::Qwen2)?.expect("a name");
        assert_eq!(q, "model.layers.3.self_attn.q_proj.bias");
        assert!(Architecture::Llama.permutes(&q) && !Architecture::Qwen2.permutes(&q));
        let norm = "blk.0.attn_k_norm.weight";
        let expected = "model.layers.0.self_attn.k_norm.weight";
        assert_eq!(name(norm, Architecture::Qwen3)?.as_deref(), Some(expected));
        assert!(!Architecture::Llama.permutes(expected));
        assert_eq!(name("rope_freqs.weight", Architecture::Llama)?, None);
        let unknown = [
            norm,
            "blk.x.attn_q.weight",
            "blk.0.ffn_gate_exps.weight",
            "blk.0.attn_q",
            "x",
        ];
        for unknown in unknown {
            let error = name(unknown, Architecture::Llama).expect_err(unknown);
            assert!(error.to_string().contains(unknown), "{error}");
        }
        Ok(())
    }

    #[test]
    fn rows_of_a_head_come_back_in_halves() -> candle_core::Result<()> {
        // Two heads of four rows: the file stores rows 0 1 2 3 in the order 0 2 1 3.
        let file = Tensor::new(&[0f32, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0], &Device::Cpu)?;
        let rows = unpermute(&file, 2)?.to_vec1::<f32>()?;
        assert_eq!(rows, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        let weight = unpermute(&file.reshape((8, 1))?, 2)?;
        assert_eq!(weight.dims(), [8, 1]);
        assert_eq!(
            permute(&unpermute(&file, 2)?, 2)?.to_vec1::<f32>()?,
            file.to_vec1::<f32>()?
        );
        Ok(())
    }
}
