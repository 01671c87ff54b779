//! A model with an adapter added to its weights, as the input of a rewrite.

use super::classes::is_classification;
use super::select::role;
use super::source::Source;
use crate::adapter::{AdapterError, AdapterFile, SavedLayer, identity};
use crate::contents::Role;
use crate::error::{Error, Result};
use crate::names::{join, weight_name};
use candle_core::{DType, Device, Tensor};
use fp8_candle::Fp8Tensor;
use fp8_core::Granularity;
use safetensors::Dtype;
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

/// A model whose weights are those of `base` plus the updates of an adapter: [`dequantize`](super::dequantize) writes it in high
/// precision, [`quantize`](super::quantize) in FP8.
///
/// A weight is base + factor B A, computed in f32 and rounded once. Updates are read together with their layer, so only the layers that
/// are being written are in memory. FP8 weights of the base are dequantized.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fp8_files::adapter::{AdapterConfig, AdapterFile, write_adapter};
/// use fp8_files::load::Checkpoint;
/// use fp8_files::rewrite::{self, Merged, WriteOptions};
/// # let dir = tempfile::tempdir()?;
/// # fp8_test_support::files::plain_model(dir.path());
/// # let adapter = dir.path().join("adapter");
/// let base = Checkpoint::open_dir(dir.path())?; // with a linear layer `fc`
/// # let &[out_features, in_features] = base.shape("fc.weight").unwrap() else { panic!() };
/// let a = Tensor::ones((1, in_features), DType::F32, &Device::Cpu)?;
/// let b = Tensor::ones((out_features, 1), DType::F32, &Device::Cpu)?;
/// write_adapter(&adapter, &AdapterConfig::new(1), [("fc".to_string(), [a, b])])?;
///
/// let adapter = AdapterFile::open(&adapter)?;
/// let merged = Merged::new(&base, &adapter)?;
/// assert_eq!(merged.layers(), ["fc"]);
/// rewrite::dequantize(&merged, dir.path().join("merged"), None, &WriteOptions::new(), &mut rewrite::quiet)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Merged<'a> {
    base: &'a dyn Source,
    adapter: &'a AdapterFile,
    /// Paths of the layers with an update.
    layers: Vec<String>,
    /// By the name of a tensor: what replaces it.
    saved: BTreeMap<String, SavedTensor>,
    /// By the name of a weight: the layer's path in the adapter, and the sizes of the weight.
    updates: BTreeMap<String, (String, (usize, usize))>,
    /// What tells the adapter from others; None without updates.
    identity: Option<String>,
}

/// The weight or the bias of a layer that an adapter replaces.
struct SavedTensor {
    layer: SavedLayer,
    is_weight: bool,
}

impl<'a> Merged<'a> {
    /// The adapter's updates beside the linear layers of `base`.
    ///
    /// # Errors
    /// As [`AdapterFile::layers`], where the matrices of a BERT's pooler are ignored if the base has no pooler;
    /// [`Error::TensorShape`](crate::Error::TensorShape) for a matrix that does not fit its layer; and [`AdapterError::Merged`] if the
    /// adapter was merged into the base before ([`Source::merged_adapters`]): a second time its updates would count twice.
    pub fn new(base: &'a dyn Source, adapter: &'a AdapterFile) -> Result<Self> {
        let names = base.names();
        let linear = names.iter().filter_map(|name| {
            let (path, role) = role(base, name)?;
            matches!(role, Role::Linear | Role::Head).then_some(path)
        });
        let linear: Vec<&str> = linear.collect();
        let mut updates = BTreeMap::new();
        let mut layers = vec![];
        for (path, own) in adapter.layers(&linear)? {
            let name = weight_name(path);
            if let Some(&[out_features, in_features]) = base.shape(&name).as_deref() {
                let sizes = (out_features, in_features);
                adapter.check_sizes(&own, sizes)?;
                layers.push(path.to_string());
                updates.insert(name, (own, sizes));
            }
        }
        let naming = adapter.naming(&linear);
        let kind = base.config().and_then(|config| config.get("model_type"));
        let is_encoder = kind.is_some_and(|kind| kind == "bert");
        let mut saved = BTreeMap::new();
        for layer in adapter.saved() {
            let own = linear.iter().find(|path| naming.of(path) == layer.path);
            if let (Some(path), false) = (own, is_classification(&layer.path)) {
                let name = weight_name(path);
                let (out_features, in_features) = layer.sizes;
                let expected = base.shape(&name).unwrap_or_default();
                if expected != [out_features, in_features] {
                    return Err(Error::TensorShape {
                        tensor: name,
                        got: vec![out_features, in_features],
                        expected: format!("{expected:?}, as the base has it"),
                    });
                }
            }
            // A classifier may be new; other layers would have no place in the model.
            let path = match own {
                Some(path) => (*path).to_string(),
                None if is_encoder && is_classification(&layer.path) => {
                    naming.back(&layer.path).to_string()
                }
                None => {
                    let (path, extra) = (adapter.path().to_path_buf(), vec![layer.path.clone()]);
                    return Err(AdapterError::Extra { path, extra }.into());
                }
            };
            let tensor = |is_weight| SavedTensor {
                layer: layer.clone(),
                is_weight,
            };
            saved.insert(weight_name(&path), tensor(true));
            if layer.bias {
                saved.insert(join(&path, "bias"), tensor(false));
            }
            layers.push(path);
        }
        // A layer that is replaced has no update.
        updates.retain(|name, _| !saved.contains_key(name));
        let matrices = |(own, sizes): &(String, (usize, usize))| -> Result<_> {
            let matrices = adapter.matrices(own, *sizes, DType::F32, &Device::Cpu)?;
            Ok((own.clone(), matrices))
        };
        let identity = identity(adapter.config(), updates.values().map(matrices))?;
        if let Some(own) = &identity
            && base.merged_adapters()?.contains(own)
        {
            let path = adapter.path().to_path_buf();
            return Err(AdapterError::Merged { path }.into());
        }
        Ok(Self {
            base,
            adapter,
            layers,
            saved,
            updates,
            identity,
        })
    }

    /// The paths of the layers with an update, in the order of the base, and of those that the adapter replaces.
    pub fn layers(&self) -> &[String] {
        &self.layers
    }
}

impl Source for Merged<'_> {
    fn names(&self) -> Vec<String> {
        let names = self.base.names();
        let new = self.saved.keys().filter(|name| !names.contains(*name));
        let new: Vec<String> = new.cloned().collect();
        names.into_iter().chain(new).collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        match self.saved.get(name) {
            None => self.base.shape(name),
            Some(saved) => Some(match (saved.is_weight, saved.layer.sizes) {
                (true, (out_features, in_features)) => vec![out_features, in_features],
                (false, (out_features, _)) => vec![out_features],
            }),
        }
    }

    fn dtype(&self, name: &str) -> Option<DType> {
        match self.saved.contains_key(name) {
            true => self.base.dtype(name).or(Some(DType::F32)),
            false => self.base.dtype(name),
        }
    }

    fn raw_dtype(&self, name: &str) -> Option<Dtype> {
        match self.saved.contains_key(name) {
            true => None,
            false => self.base.raw_dtype(name),
        }
    }

    fn raw_bytes(&self, name: &str, bytes: Range<usize>) -> Result<Vec<u8>> {
        self.base.raw_bytes(name, bytes)
    }

    fn is_fp8(&self, name: &str) -> bool {
        !self.saved.contains_key(name) && self.base.is_fp8(name)
    }

    fn codes(&self, name: &str, granularity: Granularity) -> Result<Option<Fp8Tensor>> {
        match self.saved.contains_key(name) || self.updates.contains_key(name) {
            true => Ok(None),
            false => self.base.codes(name, granularity),
        }
    }

    fn update(&self, name: &str) -> Result<Option<Tensor>> {
        let Some((own, sizes)) = self.updates.get(name) else {
            return Ok(None);
        };
        let [a, b] = (self.adapter).matrices(own, *sizes, DType::F32, &Device::Cpu)?;
        Ok(Some(
            (b.matmul(&a)? * self.adapter.config().factor_of(own)?)?,
        ))
    }

    fn merged_adapters(&self) -> Result<Vec<String>> {
        let before = self.base.merged_adapters()?.into_iter();
        Ok(before.chain(self.identity.clone()).collect())
    }

    fn value(&self, name: &str, dtype: DType) -> Result<Tensor> {
        if let Some(saved) = self.saved.get(name) {
            let layer = &saved.layer;
            let (weight, bias) = self.adapter.saved_layer(layer, dtype, &Device::Cpu)?;
            let missing = || Error::MissingTensor {
                tensor: name.to_string(),
                place: "the adapter".into(),
            };
            return match saved.is_weight {
                true => Ok(weight),
                false => bias.ok_or_else(missing),
            };
        }
        match self.update(name)? {
            None => self.base.value(name, dtype),
            Some(update) => {
                let sum = (self.base.value(name, DType::F32)? + update)?;
                Ok(sum.to_dtype(dtype)?)
            }
        }
    }

    // A product of some rows can differ from that of all rows in its last bits, so sums are made whole.
    fn rows(&self, name: &str, rows: Range<usize>, dtype: DType) -> Result<Option<Tensor>> {
        match self.saved.contains_key(name) || self.updates.contains_key(name) {
            true => Ok(None),
            false => self.base.rows(name, rows, dtype),
        }
    }

    fn config(&self) -> Option<&Value> {
        self.base.config()
    }

    fn directory(&self) -> Option<PathBuf> {
        self.base.directory()
    }

    fn files(&self) -> Result<BTreeMap<String, Value>> {
        self.base.files()
    }

    fn tied(&self) -> BTreeMap<String, String> {
        self.base.tied()
    }
}
