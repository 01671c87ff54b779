//! The input of a rewrite: an FP8 checkpoint, a file in high precision, or another kind of file that implements [`Source`].

use super::options::WriteOptions;
use crate::adapter::MERGED;
use crate::check::is_float;
use crate::contents::{AttentionScale, Contents, KvScale};
use crate::error::{Error, Result};
use crate::load::{Checkpoint, is_attention};
use candle_core::{DType, Device, Tensor};
use fp8_candle::Fp8Tensor;
use fp8_core::Granularity;
use safetensors::Dtype;
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A model whose tensors have values in high precision; [`quantize`](super::quantize) reads it.
///
/// A [`Checkpoint`] of any family is one: its FP8 weights are dequantized. Tensors that candle cannot hold, such as masks of BOOL, have bytes
/// in place of values ([`Source::raw_dtype`]), and a rewrite copies them. Implement the trait for other kinds of files. Several
/// threads request tensors at once, each one of its own.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Tensor};
/// use fp8::rewrite::{self, QuantizeOptions, Scheme, Source};
/// use std::path::PathBuf;
///
/// // A model of one layer.
/// struct Ones;
///
/// impl Source for Ones {
///     fn names(&self) -> Vec<String> { vec!["fc.weight".into()] }
///     fn shape(&self, name: &str) -> Option<Vec<usize>> { (name == "fc.weight").then(|| vec![32, 64]) }
///     fn dtype(&self, _: &str) -> Option<DType> { Some(DType::F32) }
///     fn value(&self, _: &str, dtype: DType) -> Result<Tensor, fp8::FilesError> {
///         Ok(Tensor::ones((32, 64), dtype, &Device::Cpu)?)
///     }
///     fn config(&self) -> Option<&serde_json::Value> { None }
///     fn directory(&self) -> Option<PathBuf> { None }
/// }
/// let dir = tempfile::tempdir()?;
/// let options = QuantizeOptions::new(Scheme::ChannelToken);
/// let report = rewrite::quantize(&Ones, dir.path().join("fp8"), &options, &mut rewrite::quiet)?;
/// assert_eq!(report.quantized, ["fc"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Source: Sync {
    /// Hugging Face's names of all tensors (`model.layers.0.mlp.up_proj.weight`), without the scales of FP8 weights; scales of KV caches
    /// are `..self_attn.k_scale` and `v_scale`.
    fn names(&self) -> Vec<String>;

    /// Shape of a tensor; None if no tensor has that name.
    fn shape(&self, name: &str) -> Option<Vec<usize>>;

    /// Dtype of a tensor's value; None if the value has no dtype of its own, as in FP8 and block formats, or the tensor has only bytes.
    fn dtype(&self, name: &str) -> Option<DType>;

    /// The dtype of a tensor that candle cannot hold, such as BOOL or I8; None, the default, for any other. Such a tensor has no
    /// [`Source::value`]: a rewrite copies its bytes, under its name and with its shape.
    fn raw_dtype(&self, _name: &str) -> Option<Dtype> {
        None
    }

    /// Some of the bytes of a tensor that has a [`Source::raw_dtype`], by their positions in it.
    ///
    /// # Errors
    /// If they cannot be read; [`Error::MissingTensor`] if no such tensor has that name.
    fn raw_bytes(&self, name: &str, _bytes: Range<usize>) -> Result<Vec<u8>> {
        Err(Error::MissingTensor {
            tensor: name.to_string(),
            place: "the source of bytes".into(),
        })
    }

    /// Whether a tensor is stored as FP8 codes, so that quantizing it rounds its value a second time.
    fn is_fp8(&self, _name: &str) -> bool {
        false
    }

    /// The codes and scales on the CPU of a tensor that is stored as E4M3 codes with scales of this granularity; None, the default, for any
    /// other. [`quantize`](super::quantize) keeps them instead of rounding their values again.
    ///
    /// # Errors
    /// If they cannot be read.
    fn codes(&self, _name: &str, _granularity: Granularity) -> Result<Option<Fp8Tensor>> {
        Ok(None)
    }

    /// What this source adds to the tensor of that name in the model under it, in f32 on the CPU; None, the default, if it adds nothing.
    /// [`quantize`](super::quantize) reports how much of it rounding leaves.
    ///
    /// # Errors
    /// If it cannot be computed.
    fn update(&self, _name: &str) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// The [identities](crate::adapter::identity()) of the adapters whose updates the weights have, so that none is added a second time;
    /// none by default. Rewrites keep them in the metadata of their files ([`MERGED`]).
    ///
    /// # Errors
    /// If they cannot be read.
    fn merged_adapters(&self) -> Result<Vec<String>> {
        Ok(vec![])
    }

    /// The value of a tensor on the CPU, in `dtype`, which is [`Source::dtype`] or a floating point dtype.
    ///
    /// # Errors
    /// If no tensor has that name, it cannot be read, or `dtype` cannot hold it.
    fn value(&self, name: &str, dtype: DType) -> Result<Tensor>;

    /// The value of some rows of a tensor, as [`Source::value`] gives it; None, the default, if only whole tensors can be read. Tensors
    /// of some hundred million elements are read in parts where it is possible, which bounds memory.
    ///
    /// # Errors
    /// As [`Source::value`].
    fn rows(&self, _name: &str, _rows: Range<usize>, _dtype: DType) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// The `config.json` of the model.
    fn config(&self) -> Option<&Value>;

    /// The directory of tokenizer files and the like, which are copied.
    fn directory(&self) -> Option<PathBuf>;

    /// More JSON files to write beside the weights, by name.
    ///
    /// # Errors
    /// If they cannot be computed.
    fn files(&self) -> Result<BTreeMap<String, Value>> {
        Ok(BTreeMap::new())
    }

    /// Names of weights that are stored under another name, with that name.
    fn tied(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }
}

impl Source for Checkpoint {
    fn names(&self) -> Vec<String> {
        let weights = self.layer_paths().into_iter();
        let weights = weights.map(|path| crate::names::join(&path, "weight"));
        weights.chain(self.other_names()).collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        Checkpoint::shape(self, name).map(|dims| dims.to_vec())
    }

    fn dtype(&self, name: &str) -> Option<DType> {
        match self.holds_codes(name) || Checkpoint::raw_dtype(self, name).is_some() {
            true => None,
            false => DType::try_from(Checkpoint::dtype(self, name)?).ok(),
        }
    }

    fn raw_dtype(&self, name: &str) -> Option<Dtype> {
        Checkpoint::raw_dtype(self, name)
    }

    fn raw_bytes(&self, name: &str, bytes: Range<usize>) -> Result<Vec<u8>> {
        Checkpoint::raw_bytes(self, name, bytes)
    }

    fn is_fp8(&self, name: &str) -> bool {
        self.holds_codes(name)
    }

    fn codes(&self, name: &str, granularity: Granularity) -> Result<Option<Fp8Tensor>> {
        Checkpoint::codes(self, name, granularity)
    }

    fn merged_adapters(&self) -> Result<Vec<String>> {
        let Some(json) = self.metadata(MERGED) else {
            return Ok(vec![]);
        };
        let path = Checkpoint::directory(self).unwrap_or(Path::new(""));
        let what = "the metadata entry fp8_merged_adapters";
        serde_json::from_str(json).map_err(|error| Error::json(path, what, error))
    }

    fn value(&self, name: &str, dtype: DType) -> Result<Tensor> {
        Checkpoint::value(self, name, dtype, &Device::Cpu)
    }

    fn rows(&self, name: &str, rows: Range<usize>, dtype: DType) -> Result<Option<Tensor>> {
        Checkpoint::rows(self, name, rows, dtype)
    }

    fn config(&self) -> Option<&Value> {
        Checkpoint::config(self)
    }

    fn directory(&self) -> Option<PathBuf> {
        Checkpoint::directory(self).map(Path::to_path_buf)
    }

    fn tied(&self) -> BTreeMap<String, String> {
        self.tied.clone()
    }
}

/// Ends of the names of KV scales.
const K_SCALE: &str = ".k_scale";
const V_SCALE: &str = ".v_scale";

/// Ends of the names of the other scales of attention.
const ATTENTION_SCALES: [&str; 2] = [".q_scale", ".prob_output_scale"];

/// Separates the scales of attention, which only FP8 caches and FP8 attention need, from the other names. The contents have them unless
/// `options` drop them.
pub(super) fn take_scales(
    source: &dyn Source,
    names: Vec<String>,
    options: &WriteOptions,
) -> Result<(Contents, Vec<String>)> {
    let mut scales: BTreeMap<String, [Option<Vec<f32>>; 2]> = BTreeMap::new();
    let (mut contents, mut others) = (Contents::default(), vec![]);
    let values = |name: &str| -> Result<Vec<f32>> {
        Ok(source.value(name, DType::F32)?.flatten_all()?.to_vec1()?)
    };
    for name in names {
        // Other modules may have tensors of these names too.
        let of_attention = |end: &str| name.strip_suffix(end).filter(|path| is_attention(path));
        let (attention, which) = match (of_attention(K_SCALE), of_attention(V_SCALE)) {
            (Some(attention), _) => (attention, 0),
            (_, Some(attention)) => (attention, 1),
            _ if ATTENTION_SCALES
                .iter()
                .any(|end| of_attention(end).is_some()) =>
            {
                let values = values(&name)?;
                contents.attention.push(AttentionScale { name, values });
                continue;
            }
            _ => {
                others.push(name);
                continue;
            }
        };
        let pair = scales.entry(attention.to_string()).or_default();
        pair[which] = Some(values(&name)?);
    }
    let scales = scales.into_iter().map(|(attention, pair)| match pair {
        [Some(k), Some(v)] => Ok(KvScale { attention, k, v }),
        [k, _] => {
            let missing = if k.is_some() { V_SCALE } else { K_SCALE };
            Err(Error::MissingTensor {
                tensor: format!("{attention}{missing}"),
                place: "the checkpoint, which has the other one of the pair".into(),
            })
        }
    });
    contents.kv = scales.collect::<Result<_>>()?;
    if options.drop_kv_scales {
        contents = Contents::default();
    }
    Ok((contents, others))
}

/// The dtype of the model: that of most tensors in high precision.
pub(super) fn model_dtype(source: &dyn Source, names: &[String]) -> DType {
    let mut counts = [(DType::BF16, 0), (DType::F16, 0), (DType::F32, 0)];
    for dtype in names.iter().filter_map(|name| source.dtype(name)) {
        if let Some((_, count)) = counts.iter_mut().find(|(other, _)| *other == dtype) {
            *count += 1;
        }
    }
    let most = counts.iter().max_by_key(|(_, count)| *count);
    most.map_or(DType::F32, |(dtype, _)| *dtype)
}

/// Whether a tensor is a matrix in high precision or FP8.
pub(super) fn is_matrix(source: &dyn Source, name: &str) -> bool {
    let float = source.dtype(name).is_none_or(is_float) && source.raw_dtype(name).is_none();
    float && source.shape(name).is_some_and(|dims| dims.len() == 2)
}

/// The order of layers in a model: numbers in names count as numbers.
pub(super) fn natural_order(name: &str) -> Vec<(u64, String)> {
    let part = |part: &str| match part.parse() {
        Ok(number) => (number, String::new()),
        Err(_) => (u64::MAX, part.to_string()),
    };
    name.split('.').map(part).collect()
}
