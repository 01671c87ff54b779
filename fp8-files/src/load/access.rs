//! What the writer needs to know of a checkpoint beside its tensors.

use super::Checkpoint;
use super::catalogue::Value;
use crate::names::weight_name;
use crate::{contents::Described, scheme::Kind};
use std::collections::BTreeMap;
use std::path::Path;

impl Checkpoint {
    /// How the FP8 layer at `path` is stored, without reading it.
    pub(crate) fn described(&self, path: &str) -> Option<Described> {
        let weight = self.catalogue.weights.get(&weight_name(path))?;
        let &[n, k] = weight.shape.as_slice() else {
            return None;
        };
        Some(Described {
            path: path.to_string(),
            kind: Kind {
                weight: weight.granularity,
                input: weight.input_scheme,
                power_of_two: weight.power_of_two_inputs,
                amax_bound: weight.amax_bound,
            },
            sizes: (n, k),
        })
    }

    /// Whether the value of a tensor is made of codes.
    pub(crate) fn holds_codes(&self, name: &str) -> bool {
        let codes = matches!(self.catalogue.values.get(name), Some(Value::Codes(_)));
        codes || self.catalogue.weights.contains_key(name)
    }

    /// The value of a tensor: see [`crate::rewrite::Source::value`].
    pub(crate) fn high_precision(
        &self,
        name: &str,
        dtype: candle_core::DType,
    ) -> crate::Result<candle_core::Tensor> {
        self.value(name, dtype, &candle_core::Device::Cpu)
    }

    /// The directory of its first file.
    pub(crate) fn directory(&self) -> Option<&Path> {
        let path = self.files.first()?.path();
        Some(path.parent().unwrap_or(Path::new("")))
    }

    /// Names of weights that are stored under another name, with that name.
    pub(crate) fn tied_names(&self) -> BTreeMap<String, String> {
        let tied = self.tied.iter();
        tied.map(|(name, other)| (name.clone(), other.clone()))
            .collect()
    }
}
