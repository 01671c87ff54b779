//! The names of the families.

use std::fmt;

/// A family of checkpoints: the library whose names, scales and configuration a checkpoint has.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::load::FamilyName;
/// assert_eq!(FamilyName::Fp8Blocks.to_string(), "fp8 blocks (DeepSeek, Qwen)");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FamilyName {
    /// No FP8 weights.
    HighPrecision,
    /// FP8 weights and scales without a configuration: shapes decide how layers are stored.
    ByShape,
    /// compressed-tensors, the format of llm-compressor and of this library's own exports.
    CompressedTensors,
    /// One scale per weight, `weight_scale`: AutoFP8, vLLM, Intel.
    AutoFp8,
    /// One scale per block, `weight_scale_inv` or `scale`.
    Fp8Blocks,
    /// One scale per weight, `weight_scale_inv`: Mistral's files for transformers.
    HfPerTensor,
    /// NVIDIA's ModelOpt.
    ModelOpt,
    /// FBGEMM, with an upper bound for the amax of inputs.
    Fbgemm,
    /// Mistral's own files.
    MistralNative,
    /// torchao, described in the metadata of the files.
    Torchao,
    /// AMD's Quark.
    Quark,
    /// One scale per channel: sglang.
    W8a8Fp8,
    /// MLX: four codes in a word, microscaled.
    Mlx,
    /// ComfyUI's scaled FP8.
    ComfyUi,
    /// FP8 values without scales.
    PlainCast,
}

impl fmt::Display for FamilyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::HighPrecision => "high precision",
            Self::ByShape => "fp8 without a configuration",
            Self::CompressedTensors => "compressed-tensors",
            Self::AutoFp8 => "fp8 (AutoFP8, vLLM)",
            Self::Fp8Blocks => "fp8 blocks (DeepSeek, Qwen)",
            Self::HfPerTensor => "fp8 per tensor (Mistral for transformers)",
            Self::ModelOpt => "modelopt",
            Self::Fbgemm => "fbgemm_fp8",
            Self::MistralNative => "Mistral native",
            Self::Torchao => "torchao",
            Self::Quark => "quark",
            Self::W8a8Fp8 => "w8a8_fp8",
            Self::Mlx => "mlx mxfp8",
            Self::ComfyUi => "ComfyUI scaled fp8",
            Self::PlainCast => "fp8 values without scales",
        })
    }
}
