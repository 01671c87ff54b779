//! The families of FP8 files that can be written.

use fp8_core::ParseNameError;
use std::fmt;
use std::str::FromStr;

/// A family of FP8 files that can be written.
///
/// In all of them a weight's value is code * scale. They differ in what they can hold:
///
/// | spelling | weights | inputs | KV scales | read by |
/// |---|---|---|---|---|
/// | `compressed-tensors` | tensor, channel, block, MX; mixed | none, static, per token, tensor, group, MX | per tensor or head | vLLM, sglang, transformers |
/// | `fp8-blocks` | blocks of one size | per group of the block's columns | - | DeepSeek's and Qwen's loaders, vLLM, sglang, transformers; a head in FP8 by transformers only |
/// | `autofp8` | tensor | all static or all per token | one number for keys and values | vLLM, sglang |
/// | `modelopt` | tensor + static, channel + per token, blocks of 128 without inputs, MX; mixed | | per tensor | TensorRT-LLM, vLLM, sglang; mixtures by TensorRT-LLM, by vLLM only layers with tensor + static and, in newer versions, MX |
///
/// Where vLLM does not read a layer that the files can hold, [`WriteReport::unread_by_vllm`](crate::rewrite::WriteReport::unread_by_vllm)
/// names it.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::rewrite::Spelling;
/// let spelling: Spelling = "fp8-blocks".parse()?;
/// assert_eq!(spelling, Spelling::Fp8Blocks);
/// assert_eq!(spelling.to_string(), "fp8-blocks");
/// assert!("gptq".parse::<Spelling>().is_err());
/// # Ok::<(), fp8_core::ParseNameError>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Spelling {
    /// llm-compressor's and this library's own; it can hold the most.
    #[default]
    CompressedTensors,
    /// DeepSeek's and Qwen's: blocks with `weight_scale_inv`.
    Fp8Blocks,
    /// vLLM's first format: one scale per weight.
    AutoFp8,
    /// NVIDIA's ModelOpt, with both configuration files.
    ModelOpt,
}

impl Spelling {
    /// All of them.
    pub const ALL: [Self; 4] = [
        Self::CompressedTensors,
        Self::Fp8Blocks,
        Self::AutoFp8,
        Self::ModelOpt,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::CompressedTensors => "compressed-tensors",
            Self::Fp8Blocks => "fp8-blocks",
            Self::AutoFp8 => "autofp8",
            Self::ModelOpt => "modelopt",
        }
    }

    /// What a file of this spelling can hold, for errors.
    pub(crate) fn takes(self) -> &'static str {
        match self {
            Self::CompressedTensors => {
                "weights per tensor, channel or block with any inputs but microscaled ones, and microscaled weights \
                 with microscaled inputs or none"
            }
            Self::Fp8Blocks => {
                "blocks of one size in all layers, with inputs scaled per group of the block's columns"
            }
            Self::AutoFp8 => {
                "one scale per weight, inputs either all static or all per token with exact scales, and no FP8 head"
            }
            Self::ModelOpt => {
                "in each layer one of these: weights per tensor with static inputs (FP8), weights per channel or tensor with \
     inputs per token (FP8_PER_CHANNEL_PER_TOKEN), blocks of 128x128 with inputs in high precision (fp8_pb_wo), microscaled weights and inputs \
     (MXFP8)"
            }
        }
    }
}

impl fmt::Display for Spelling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Spelling {
    type Err = ParseNameError;

    fn from_str(name: &str) -> Result<Self, ParseNameError> {
        let mut all = Self::ALL.into_iter();
        all.find(|spelling| spelling.name() == name)
            .ok_or_else(|| ParseNameError {
                what: "spelling",
                name: name.to_string(),
                expected: "compressed-tensors, fp8-blocks, autofp8 or modelopt",
            })
    }
}
