//! A model's files with trained values.

use super::error::Result;
use super::vars::locked;
use crate::rewrite::Source;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarMap;
use safetensors::Dtype;
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

/// A model's files with other values for some tensors, as the source of a [`rewrite`](crate::rewrite):
/// [`dequantize`](crate::rewrite::dequantize) writes it in high precision, [`quantize`](crate::rewrite::quantize) in FP8.
///
/// Tensors without a variable, which the model does not use, keep their values. Variables that the file lacks, such as those of a
/// new classifier, are added as tensors; [`rewrite::Classifier`](crate::rewrite::Classifier) gives the file its names and its configuration.
pub struct Trained<'a> {
    source: &'a dyn Source,
    values: BTreeMap<String, Tensor>,
}

impl<'a> Trained<'a> {
    /// The model of `source` with the values of `vars`.
    ///
    /// # Errors
    /// If the lock of `vars` is poisoned.
    pub fn new(source: &'a dyn Source, vars: &VarMap) -> Result<Self> {
        let vars = locked(vars)?;
        let values = vars.iter().map(|(name, var)| (name.clone(), var.detach()));
        Ok(Self {
            source,
            values: values.collect(),
        })
    }
}

impl std::fmt::Debug for Trained<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trained")
            .field("values", &self.values.len())
            .finish_non_exhaustive()
    }
}

impl Source for Trained<'_> {
    fn names(&self) -> Vec<String> {
        let (names, tied) = (self.source.names(), self.source.tied());
        let known = |name: &String| names.contains(name) || tied.contains_key(name);
        let new = self.values.keys().filter(|name| !known(name));
        let new: Vec<String> = new.cloned().collect();
        names.into_iter().chain(new).collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        match self.values.get(name) {
            Some(value) => Some(value.dims().to_vec()),
            None => self.source.shape(name),
        }
    }

    fn dtype(&self, name: &str) -> Option<DType> {
        match self.values.get(name) {
            Some(value) => Some(value.dtype()),
            None => self.source.dtype(name),
        }
    }

    fn raw_dtype(&self, name: &str) -> Option<Dtype> {
        match self.values.contains_key(name) {
            true => None,
            false => self.source.raw_dtype(name),
        }
    }

    fn raw_bytes(&self, name: &str, bytes: Range<usize>) -> crate::fp8_files::Result<Vec<u8>> {
        self.source.raw_bytes(name, bytes)
    }

    fn is_fp8(&self, name: &str) -> bool {
        !self.values.contains_key(name) && self.source.is_fp8(name)
    }

    fn merged_adapters(&self) -> crate::fp8_files::Result<Vec<String>> {
        self.source.merged_adapters()
    }

    fn value(&self, name: &str, dtype: DType) -> crate::fp8_files::Result<Tensor> {
        match self.values.get(name) {
            Some(value) => Ok(value.to_device(&Device::Cpu)?.to_dtype(dtype)?),
            None => self.source.value(name, dtype),
        }
    }

    fn rows(
        &self,
        name: &str,
        rows: Range<usize>,
        dtype: DType,
    ) -> crate::fp8_files::Result<Option<Tensor>> {
        let Some(value) = self.values.get(name) else {
            return self.source.rows(name, rows, dtype);
        };
        let part = value.narrow(0, rows.start, rows.len())?;
        Ok(Some(part.to_device(&Device::Cpu)?.to_dtype(dtype)?))
    }

    fn config(&self) -> Option<&Value> {
        self.source.config()
    }

    fn directory(&self) -> Option<PathBuf> {
        self.source.directory()
    }

    fn files(&self) -> crate::fp8_files::Result<BTreeMap<String, Value>> {
        self.source.files()
    }

    fn tied(&self) -> BTreeMap<String, String> {
        self.source.tied()
    }
}
