//! How each family writes a layer: names, shapes, dtypes, and the configuration.

mod autofp8;
mod compressed_tensors;
mod fp8_blocks;
mod modelopt;
mod part;

pub(crate) use part::{Layout, Part};

use crate::contents::{AttentionScale, Contents, Described, KvScale};
use crate::error::{Error, Result};
use crate::names::join;
use crate::scheme::InputScheme;
use crate::spelling::Spelling;
use candle_core::{Device, Tensor};
use fp8_candle::{Fp8Tensor, InputScaling};
use serde_json::Value;

impl Spelling {
    /// Whether the family's configuration has a key for input scales that are powers of two.
    pub fn says_power_of_two(self) -> bool {
        self == Self::Fp8Blocks
    }

    /// Checks that a file of this spelling can hold `contents`.
    ///
    /// # Errors
    /// [`Error::Inexpressible`] for the first layer or scale that it cannot hold.
    pub fn check(self, contents: &Contents) -> Result<()> {
        let mut layers = contents.layers.iter();
        if let Some(layer) = layers.find(|layer| layer.scheme.input.amax_bound().is_some()) {
            return Err(self.refuses(layer));
        }
        if let (false, Some(scale)) = (self == Self::CompressedTensors, contents.attention.first())
        {
            return Err(self.refuses_attention(scale));
        }
        match self {
            Self::CompressedTensors => compressed_tensors::check(contents),
            Self::Fp8Blocks => fp8_blocks::check(contents),
            Self::AutoFp8 => autofp8::check(contents),
            Self::ModelOpt => modelopt::check(contents),
        }
    }

    /// Paths of the layers that vLLM does not read as FP8 in a file of this spelling, although the spelling can hold them and other engines
    /// read them: a head in `fp8-blocks`; in a mixture of ModelOpt all layers but those with weights per tensor and static inputs, since it knows
    /// no other scheme there (MXFP8 in newer versions); and layers of ModelOpt's files whose path has that of an ignored layer in it. It takes
    /// their codes for values, or fails.
    pub fn unread_by_vllm(self, contents: &Contents) -> Vec<String> {
        let layers = match self {
            Self::Fp8Blocks => fp8_blocks::unread_by_vllm(contents),
            Self::ModelOpt => modelopt::unread_by_vllm(contents),
            Self::CompressedTensors | Self::AutoFp8 => vec![],
        };
        let paths = layers.into_iter().map(|layer| layer.path.clone());
        paths.collect()
    }

    /// The tensors of a layer that has passed [`Spelling::check`].
    pub(crate) fn layouts(self, layer: &Described) -> Vec<Layout> {
        let (weight_scale, input_dims) = match self {
            Self::CompressedTensors => (compressed_tensors::weight_scale(layer), vec![1]),
            Self::Fp8Blocks => (fp8_blocks::weight_scale(layer), vec![]),
            Self::AutoFp8 => (autofp8::weight_scale(), vec![]),
            Self::ModelOpt => (modelopt::weight_scale(layer), vec![]),
        };
        let mut layouts = vec![Layout::codes(layer), weight_scale];
        if layer.scheme.input == InputScheme::Static(()) {
            layouts.push(Layout::scale(Part::InputScale, "input_scale", input_dims));
        }
        layouts
    }

    /// The tensors of a layer that has passed [`Spelling::check`], by name: codes and scales as a file of this spelling has them.
    ///
    /// # Errors
    /// [`Error::NotExportable`] if the file stores scales as powers of two and one is not.
    pub fn tensors(
        self,
        layer: &Described,
        codes: &Fp8Tensor,
        input: &InputScaling,
    ) -> Result<Vec<(String, Tensor)>> {
        let named = |layout: Layout| {
            let tensor = layout.tensor(&layer.path, codes, input)?;
            Ok((join(&layer.path, layout.own), tensor))
        };
        self.layouts(layer).into_iter().map(named).collect()
    }

    /// `quantization_config` of `config.json`.
    pub fn quantization(self, contents: &Contents) -> Value {
        match self {
            Self::CompressedTensors => compressed_tensors::quantization(contents),
            Self::Fp8Blocks => fp8_blocks::quantization(contents),
            Self::AutoFp8 => autofp8::quantization(contents),
            Self::ModelOpt => modelopt::quantization(contents),
        }
    }

    /// The family's second configuration file, with its name.
    pub fn second_config(self, contents: &Contents) -> Option<(&'static str, Value)> {
        match self {
            Self::ModelOpt => Some(("hf_quant_config.json", modelopt::second_config(contents))),
            _ => None,
        }
    }

    /// The scales of caches and attention, by the family's names; those of one cache together.
    pub(crate) fn attention_tensors(
        self,
        contents: &Contents,
    ) -> candle_core::Result<Vec<Vec<(String, Tensor)>>> {
        use candle_core::Result;
        let tensor = |name: String, values: &[f32], is_scalar: bool| -> Result<_> {
            let dims = match values.len() {
                _ if is_scalar => vec![],
                1 => vec![1],
                heads => vec![heads, 1, 1],
            };
            Ok((name, Tensor::from_slice(values, dims, &Device::Cpu)?))
        };
        let of_cache = |scale: &KvScale| {
            let named = |own: &str| join(&scale.attention, own);
            let both = |k: &str, v: &str, is_scalar| {
                let k = tensor(named(k), &scale.k, is_scalar)?;
                Ok(vec![k, tensor(named(v), &scale.v, is_scalar)?])
            };
            match self {
                Self::CompressedTensors => both("k_scale", "v_scale", false),
                Self::ModelOpt => both("k_proj.k_scale", "v_proj.v_scale", true),
                Self::AutoFp8 => Ok(vec![tensor(named("kv_scale"), &scale.k, true)?]),
                Self::Fp8Blocks => Ok(vec![]),
            }
        };
        let caches = contents.kv.iter().map(of_cache);
        // Queries and probabilities, under their canonical names.
        let others = contents.attention.iter();
        let others =
            others.map(|scale| Ok(vec![tensor(scale.name.clone(), &scale.values, false)?]));
        caches.chain(others).collect()
    }

    fn refuses_attention(self, scale: &AttentionScale) -> Error {
        let (layer, own) = scale.name.rsplit_once('.').unwrap_or(("", &scale.name));
        Error::Inexpressible {
            layer: layer.to_string(),
            has: format!("a scale `{own}` of its attention"),
            spelling: self,
            takes: "scales of attention for cached keys and values at most",
        }
    }

    /// The error for a layer that a file of this spelling cannot hold.
    fn refuses(self, layer: &Described) -> Error {
        self.refuses_because(layer, "")
    }

    /// The same, with `why` after the description of the layer.
    fn refuses_because(self, layer: &Described, why: &str) -> Error {
        Error::Inexpressible {
            layer: layer.path.clone(),
            has: format!("{}{why}", layer.scheme),
            spelling: self,
            takes: self.takes(),
        }
    }

    fn refuses_kv(self, scale: &KvScale, takes: &'static str) -> Error {
        let (k, v) = (scale.k.len(), scale.v.len());
        let has = match (scale.k.as_slice(), scale.v.as_slice()) {
            ([k], [v]) => format!("KV cache scales {k} for keys and {v} for values"),
            _ => format!("KV cache scales of {k} and {v} heads"),
        };
        Error::Inexpressible {
            layer: scale.attention.clone(),
            has,
            spelling: self,
            takes,
        }
    }
}
