//! How each family writes a layer: names, shapes, dtypes, and the configuration beside it.

mod autofp8;
mod compressed_tensors;
mod fp8_blocks;
mod modelopt;
mod part;

pub(crate) use part::{Layout, Part};

use crate::contents::{AttentionScale, Contents, Described, KvScale};
use crate::error::{Error, Result};
use crate::names::join;
use crate::spelling::Spelling;
use candle_core::{DType, Device, Tensor};
use fp8_candle::{Fp8Tensor, InputScaling};
use serde_json::Value;

impl Spelling {
    /// Whether the family's own configuration can say that input scales are powers of two.
    pub fn says_power_of_two(self) -> bool {
        self == Self::Fp8Blocks
    }

    /// Fails unless the file can say all of it.
    pub fn check(self, contents: &Contents) -> Result<()> {
        let mut layers = contents.layers.iter();
        if let Some(layer) = layers.find(|layer| layer.kind.amax_bound.is_some()) {
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

    /// The tensors of a layer that has passed [`Spelling::check`].
    pub(crate) fn layouts(self, layer: &Described) -> Vec<Layout> {
        match self {
            Self::CompressedTensors => compressed_tensors::layouts(layer),
            Self::Fp8Blocks => fp8_blocks::layouts(layer),
            Self::AutoFp8 => autofp8::layouts(layer),
            Self::ModelOpt => modelopt::layouts(layer),
        }
    }

    /// The tensors of a layer that has passed [`Spelling::check`], by name: codes and scales as a file of this spelling has them.
    ///
    /// # Errors
    /// [`Error::NotExportable`] if scales are no powers of two where the file holds nothing else.
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

    /// Another configuration file that belongs to the family, by name.
    pub fn second_config(self, contents: &Contents) -> Option<(&'static str, Value)> {
        match self {
            Self::ModelOpt => Some(("hf_quant_config.json", modelopt::second_config(contents))),
            _ => None,
        }
    }

    /// The KV scales under the family's names.
    pub(crate) fn kv_tensors(self, scale: &KvScale) -> Result<Vec<(String, Tensor)>> {
        let path = &scale.attention;
        let tensor = |own: &str, values: &[f32], dims: Vec<usize>| -> Result<(String, Tensor)> {
            let tensor = Tensor::from_slice(values, dims, &Device::Cpu)?.to_dtype(DType::F32)?;
            Ok((join(path, own), tensor))
        };
        let both = |k: &str, v: &str, dims: &dyn Fn(usize) -> Vec<usize>| {
            Ok(vec![
                tensor(k, &scale.k, dims(scale.k.len()))?,
                tensor(v, &scale.v, dims(scale.v.len()))?,
            ])
        };
        match self {
            Self::CompressedTensors => both("k_scale", "v_scale", &|heads| match heads {
                1 => vec![1],
                _ => vec![heads, 1, 1],
            }),
            Self::ModelOpt => both("k_proj.k_scale", "v_proj.v_scale", &|_| vec![]),
            Self::AutoFp8 => Ok(vec![tensor("kv_scale", &scale.k, vec![])?]),
            Self::Fp8Blocks => Ok(vec![]),
        }
    }

    /// A scale of queries or probabilities under its canonical name.
    pub(crate) fn attention_tensor(self, scale: &AttentionScale) -> Result<Tensor> {
        let dims = match scale.values.len() {
            1 => vec![1],
            heads => vec![heads, 1, 1],
        };
        Ok(Tensor::from_slice(&scale.values, dims, &Device::Cpu)?)
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

    /// The same with what is the matter with it, as it reads after what the layer is.
    fn refuses_because(self, layer: &Described, why: &str) -> Error {
        Error::Inexpressible {
            layer: layer.path.clone(),
            has: format!("{}{why}", layer.kind),
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
