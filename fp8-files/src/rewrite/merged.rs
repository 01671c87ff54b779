//! A model with an adapter added to its weights, as the input of a rewrite.

use super::select::role;
use super::source::Source;
use crate::adapter::AdapterFile;
use crate::contents::Role;
use crate::error::Result;
use crate::names::weight_name;
use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A model whose weights are those of `base` plus the updates of an adapter: [`dequantize`](super::dequantize) writes it in high
/// precision, [`quantize`](super::quantize) in FP8.
///
/// A weight is base + factor B A, computed in f32 and rounded once. Updates are read when their layer is, so that one layer at a time
/// is in memory. FP8 weights of the base are dequantized.
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
    /// By the name of a weight: the layer's path in the adapter, and the sizes of the weight.
    updates: BTreeMap<String, (String, (usize, usize))>,
}

impl<'a> Merged<'a> {
    /// The adapter's updates beside the linear layers of `base`.
    ///
    /// # Errors
    /// As [`AdapterFile::layers`], where the matrices of a BERT's pooler are ignored if the base has no pooler; and
    /// [`Error::TensorShape`](crate::Error::TensorShape) for a matrix that does not fit its layer.
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
        Ok(Self {
            base,
            adapter,
            layers,
            updates,
        })
    }

    /// The paths of the layers with an update, in the order of the base.
    pub fn layers(&self) -> &[String] {
        &self.layers
    }
}

impl Source for Merged<'_> {
    fn names(&self) -> Vec<String> {
        self.base.names()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.base.shape(name)
    }

    fn dtype(&self, name: &str) -> Option<DType> {
        self.base.dtype(name)
    }

    fn is_fp8(&self, name: &str) -> bool {
        self.base.is_fp8(name)
    }

    fn value(&self, name: &str, dtype: DType) -> Result<Tensor> {
        let Some((own, sizes)) = self.updates.get(name) else {
            return self.base.value(name, dtype);
        };
        let [a, b] = (self.adapter).matrices(own, *sizes, DType::F32, &Device::Cpu)?;
        let update = (b.matmul(&a)? * self.adapter.config().factor_of(own)?)?;
        let sum = (self.base.value(name, DType::F32)? + update)?;
        Ok(sum.to_dtype(dtype)?)
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
