//! The kinds of faults, each with its code, its severity and what to do.

use std::fmt;

/// How bad a fault is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Suspicious: a choice that costs accuracy, or a file that some engines read wrongly.
    Warning,
    /// The model does not load, or loads as nonsense.
    Error,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Warning => "warning",
            Self::Error => "error",
        })
    }
}

macro_rules! faults {
    ($($severity:ident $name:ident $code:literal $what:literal $help:literal;)*) => {
        /// A kind of fault. Its code never changes, so programs may rely on it.
        ///
        /// ```
        /// use fp8_files::audit::{Fault, Severity};
        /// assert_eq!(Fault::ScaleMissing.code(), "scale-missing");
        /// assert_eq!(Fault::ScaleMissing.severity(), Severity::Error);
        /// ```
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Fault {
            $(#[doc = $what] $name,)*
        }

        impl Fault {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Its short name in kebab case.
            pub fn code(self) -> &'static str {
                match self { $(Self::$name => $code),* }
            }

            /// How bad it is.
            pub fn severity(self) -> Severity {
                match self { $(Self::$name => Severity::$severity),* }
            }

            /// What it is, in a sentence.
            pub fn what(self) -> &'static str {
                match self { $(Self::$name => $what),* }
            }

            /// What to do about it.
            pub fn help(self) -> &'static str {
                match self { $(Self::$name => $help),* }
            }
        }
    };
}

faults! {
    // Files.
    Error NoWeights "no-weights" "There is no safetensors file of a model."
        "Download the weights, or name the folder that holds them.";
    Error FileMissing "file-missing" "A file of the model is missing."
        "Download the file again; without it the layers in it stay at their initial values or fail to load.";
    Error FileUnreadable "file-unreadable" "A file cannot be opened or read."
        "Check its permissions and its kind, or download it again.";
    Error LfsPointer "lfs-pointer" "A file is the pointer of git-lfs, not the weights."
        "Run `git lfs pull`, or download the file itself.";
    Error FileTruncated "file-truncated" "A file ends before its data does."
        "The download was interrupted: download the file again.";
    Error FileTooLong "file-too-long" "A file has more bytes than its header describes."
        "It was overwritten in place or joined with another: download it again.";
    Error HeaderInvalid "header-invalid" "The header of a file is not valid."
        "It is not a safetensors file, or a damaged one: download or write it again.";
    Error NameRepeated "name-repeated" "A header has the same name twice."
        "It is ambiguous which of the two is meant: write the file again.";
    Error UnknownDtype "unknown-dtype" "A tensor has a dtype that the safetensors format does not know."
        "Write it with a dtype of the format, such as F8_E4M3.";
    Error IndexInvalid "index-invalid" "The index of the shards is not valid."
        "Download the index again; it maps every tensor to a file beside it.";
    Error IndexMissing "index-missing" "There are shards but no index."
        "Download `model.safetensors.index.json`.";
    Error IndexTensorMissing "index-tensor-missing" "A tensor is not in the file that the index names."
        "Index and shards are of different versions: download both again.";
    Warning TensorNotInIndex "tensor-not-in-index" "A tensor is in a shard, but not in the index."
        "Loaders that follow the index do not read it: add it, or remove it from the shard.";
    Warning FileNotInIndex "file-not-in-index" "A shard is in the folder, but not in the index."
        "It may be left from another version: remove it, or download the index that belongs to it.";
    Error DuplicateTensor "duplicate-tensor" "A tensor is in two files."
        "It is ambiguous which of the two is meant: remove one, or add an index.";

    // The configuration.
    Error ConfigInvalid "config-invalid" "A configuration is not valid JSON."
        "Download it again, or repair it.";
    Error ConfigUnsupported "config-unsupported" "The configuration describes a quantization that cannot be read."
        "Correct the entry, if the tensors are of another kind than it says.";
    Error ConfigAmbiguous "config-ambiguous" "Entries of the configuration contradict each other about a layer."
        "Give the layer one entry.";
    Warning ConfigsDiffer "configs-differ" "The two configuration files of ModelOpt contradict each other."
        "Engines read one or the other: take both from one export, or correct the wrong one.";
    Error ConfigOfOther "config-of-other-family" "The configuration names another family than the tensors."
        "Take the configuration that was written with these files: with this one the scales are not found.";
    Warning ConfigMissing "config-missing" "There are scaled FP8 weights, but `config.json` says nothing about quantization."
        "Add the `quantization_config` of the family. transformers would load the codes without their scales.";
    Error ConfigWithoutFp8 "config-without-fp8" "The configuration says FP8, but no weight is."
        "Remove `quantization_config` from a model in high precision, or take the quantized files.";
    Error IgnoredLayerQuantized "ignored-layer-quantized" "A layer is FP8, but the configuration leaves it in high precision."
        "Remove it from the list: engines read its codes without the scale.";
    Warning IgnoreMatchesNothing "ignore-matches-nothing" "An entry of the list of layers in high precision names no module."
        "Correct the name (prefix, misspelling), or remove the entry.";
    Warning IgnoreFusedName "ignore-fused-name" "An entry names a fused layer, where the file has its parts."
        "Name the parts (q_proj, k_proj, v_proj; gate_proj, up_proj).";
    Warning TargetMatchesNothing "target-matches-nothing" "A target of a group names no module."
        "Correct the name, or remove the target.";
    Warning LayerNotQuantized "layer-not-quantized" "A layer is in high precision, but the configuration says FP8."
        "Add it to the list of ignored layers: engines expect codes and a scale.";
    Warning FusedPartlyQuantized "fused-partly-quantized" "Some parts of a layer that engines fuse are FP8, others are not."
        "Quantize q_proj, k_proj and v_proj alike, and gate_proj and up_proj: engines refuse or misread a mixture.";
    Error ForeignFormat "foreign-format" "A tensor belongs to a format that is not read here."
        "Read it with the library that wrote it.";

    // Tensors.
    Error ScaleMissing "scale-missing" "An FP8 weight has no scale."
        "Take the complete file. The codes alone are hundreds of times too large.";
    Error ScaleSpelling "scale-other-spelling" "The scale of an FP8 weight has the name of another family."
        "Rename it, or correct the configuration: a loader does not find it and uses the codes without it.";
    Error ScaleWithoutWeight "scale-without-weight" "A scale has no weight."
        "The weight is missing or has another name: take the complete file.";
    Error ScaledWeightNotFp8 "scaled-weight-not-fp8" "A weight in high precision has a scale beside it."
        "Remove the scale if the weight is dequantized, else restore its codes: engines would scale it a second time.";
    Error CodesAsBytes "codes-as-bytes" "FP8 codes are stored as integers."
        "Store the same bytes as F8_E4M3: as numbers they mean something else.";
    Error CodesAsValues "codes-as-values" "A weight in high precision holds FP8 codes without their scale."
        "It was loaded without its scale and saved again: take the original file.";
    Error DuplicateSpelling "duplicate-spelling" "Two tensors stand for the same one."
        "Keep one of them.";
    Error WeightDtype "weight-dtype" "An FP8 weight is not E4M3."
        "Quantize it to F8_E4M3; E5M2 and FNUZ codes mean other values.";
    Error WeightShape "weight-shape" "An FP8 weight does not have the shape that it must have."
        "Weights of linear layers are matrices [out, in].";
    Error ScaleDtype "scale-dtype" "A scale has a dtype that its kind does not have."
        "Floating point for numbers, U8 or F8_E8M0 for powers of two in groups or blocks.";
    Error ScaleShape "scale-shape" "The shape of a scale does not fit the weight and the declared granularity."
        "Correct the granularity or the block size in the configuration, or write the scale again.";
    Error ScaleTransposed "scale-transposed" "A scale has rows and columns exchanged."
        "Transpose it.";
    Error ScalePadding "scale-padding" "A grid of scales is larger than the weight needs, with different numbers beyond it."
        "The blocks have another size than the configuration says.";
    Error InputScaleMissing "input-scale-missing" "A layer with static inputs has no input scale."
        "Take the complete file, or declare dynamic inputs. A default of 1 clips or crushes activations.";
    Warning InputScaleUnused "input-scale-unused" "A layer has an input scale that the configuration does not use."
        "Declare static inputs, or remove the tensor.";
    Error ZeroPoint "zero-point" "A zero point is not 0."
        "FP8 is symmetric: the tensors are of an integer format, or damaged.";
    Warning UnknownScale "unknown-scale" "A layer has a tensor that looks like a scale, under a name that no family has."
        "Rename it as the family does: a loader drops it.";

    // Numbers.
    Error ScaleNotFinite "scale-not-finite" "A scale is NaN or infinite."
        "Quantize the layer again; its amax was not finite, or 0 was divided by 0.";
    Error ScaleNegative "scale-negative" "A scale is negative."
        "Scales are positive: the tensor is something else, or damaged.";
    Error ScaleZero "scale-zero" "A scale is 0 although its codes are not."
        "Quantize the layer again.";
    Error ScaleTiny "scale-out-of-range" "A scale or its reciprocal is too small for a normal f32."
        "The tensor was never filled, or is damaged: quantize the layer again.";
    Error ScalesOne "scales-one" "The scales of FP8 weights are all 1."
        "They were left at their default: take the scales of the quantized file.";
    Error ScalesInverted "scales-inverted" "Scales are reciprocals: the number to divide by."
        "Store 1 / scale. In every family the value is code * stored number, whatever the name says.";
    Error ScalesTooLarge "scales-too-large" "Scales are too large, by about the largest FP8 value (448 or 240)."
        "Store amax / 448 instead of amax.";
    Error ScalesTooSmall "scales-too-small" "Scales are too small, by about the largest FP8 value (448 or 240)."
        "They were divided by it twice: store amax / 448.";
    Error ScalesImplausible "scales-implausible" "Scales give weights of an implausible size."
        "Compare with the original weights; the tensor may hold something else.";
    Error ScaleOutlier "scale-outlier" "A scale differs from the others by orders of magnitude."
        "Compare the layer with the original weights, and quantize it again.";
    Error E8m0AsFloat "e8m0-as-float" "Exponent bytes (E8M0) were converted to floats."
        "Store 2^(byte - 127), or the bytes themselves as U8 or F8_E8M0.";
    Warning NotPowersOfTwo "scales-not-powers-of-two" "The configuration says ue8m0, but scales are not powers of two."
        "Kernels for ue8m0 drop the mantissa: quantize again with powers of two, or remove `scale_fmt`.";
    Error InputScalesImplausible "input-scales-implausible" "Static input scales give activations of an implausible size."
        "They may be reciprocals, or off by 448: store amax / 448 of the calibrated inputs.";
    Warning InputScalesOne "input-scales-one" "All static input scales are 1."
        "They were not calibrated: calibrate the model.";
    Warning InputScalesDiffer "input-scales-differ" "Layers with the same input have different input scales."
        "Use the largest for all of them: engines that fuse them do, and the codes of the others clip or lose bits.";

    // Caches.
    Warning KvScaleUnknown "kv-scale-unknown" "A scale of a KV cache has a name that no engine knows."
        "Rename it to `k_scale` and `v_scale` of the attention: it is dropped, and the cache runs with 1.";
    Warning KvScalesOne "kv-scales-one" "All scales of the KV cache are 1."
        "They were not calibrated, or were clamped to 1 by an old exporter. Calibrate them if long contexts lose accuracy.";
    Warning KvScalesMissing "kv-scales-missing" "The configuration says an FP8 cache with stored scales, but there are none."
        "Calibrate the cache, or remove the entry: engines use 1.";
    Warning KvScalesPartial "kv-scales-partial" "Some layers have scales of the KV cache, others do not."
        "Take the complete file: the other layers run with 1.";
    Error KvScaleConflict "kv-scale-conflict" "A scale of the KV cache has two names with different numbers."
        "Keep one of them.";

    // Codes.
    Error NanCodes "nan-codes" "FP8 codes are NaN (0x7F, 0xFF)."
        "Values beyond 448 were cast without a limit, or 0 was divided by 0: quantize the layer again.";
    Error FnuzCodes "fnuz-codes" "FP8 codes are those of MI300 (FNUZ), stored as F8_E4M3."
        "Convert them: the code 0x80 becomes 0, and 0x7F and 0xFF, which are 240 there, need another scale.";
    Error SaturatedCodes "saturated-codes" "Many codes have the largest magnitude: weights were clipped."
        "The scale was too small when the weight was cast: quantize the layer again.";
    Warning UnusedRange "unused-range" "Codes reach only a part of the range."
        "The scale was made for another largest value (240) than 448: quantize again to use all bits.";
    Warning ZeroWeights "zero-weights" "All codes that were read of a layer are 0."
        "The layer computes nothing, or the download left a hole: compare it with the original.";
    Error ValuesNotFinite "values-not-finite" "A small tensor in high precision holds NaN or Inf."
        "The file is damaged, or training diverged.";

    // The model.
    Error LayersMissing "layers-missing" "There are fewer layers or experts than the configuration says."
        "Shards are missing: download the complete model.";
    Error LayerIncomplete "layer-incomplete" "A module lacks a weight that the same module of the other layers has."
        "Take the complete file.";
    Error ConfigShape "config-shape" "A tensor has another size than the configuration says."
        "The configuration belongs to another model.";
    Error HeadMissing "head-missing" "The model has no output head, and its embedding is not tied to one."
        "Take the complete file, or set `tie_word_embeddings` if they are tied.";
    Error TiedHeadQuantized "tied-head-quantized" "The output head is FP8 although it is tied to the embedding."
        "Set `tie_word_embeddings` to false: a tied model drops the head and its scale.";
    Warning TiedHeadDiffers "tied-head-differs" "The output head differs from the embedding to which it is tied."
        "Set `tie_word_embeddings` to false, or remove the head: a tied model does not read it.";
    Warning HeadQuantized "head-quantized" "The output head is FP8 in a family in which vLLM reads it in high precision."
        "Leave `lm_head` in high precision, and list it: vLLM drops its scale under this method (transformers reads it in blocks).";

    // Everything else.
    Error Refused "refused" "The loader refuses the files for another reason."
        "See the message.";
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.code())
    }
}
