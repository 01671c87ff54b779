//! What is in a set of files, by canonical names: FP8 weights with their scales, and everything else.
//!
//! A family only supplies its names and what its configuration declares for each layer. The checks are made here, the same for every
//! family: a weight has its scale, a scale its weight, configuration and file agree.

use super::family::{Global, ScaleLayout};
use super::files::{Files, Stored};
use super::kv_names;
use super::options::OpenOptions;
use super::refuse;
use crate::error::{Error, Result};
use crate::names::{join, split, weight_name};
use crate::scheme::LayerScheme;
use safetensors::Dtype;
use std::collections::BTreeMap;

/// An FP8 weight.
#[derive(Debug)]
pub(super) struct Weight {
    pub(super) codes: Stored,
    /// `[N, K]`.
    pub(super) shape: [usize; 2],
    /// None if the codes are the values.
    pub(super) scale: Option<Stored>,
    /// The number that acts on all scales, if there is one.
    pub(super) global: Option<(Stored, Global)>,
    pub(super) layout: ScaleLayout,
    /// Whether the file has E2M1 codes, two in a byte.
    pub(super) fp4: bool,
    pub(super) input: Option<Stored>,
    pub(super) scheme: LayerScheme,
}

/// A tensor that is neither an FP8 weight nor the scale of one.
#[derive(Debug)]
pub(super) enum Value {
    /// As stored.
    Tensor(Stored),
    /// FP8 codes that are values.
    Codes(Stored),
    /// Scales of a cache: `[1]` or one per head.
    CacheScale { stored: Stored, shape: Vec<usize> },
}

impl Value {
    pub(super) fn stored(&self) -> &Stored {
        match self {
            Self::Tensor(stored) | Self::Codes(stored) => stored,
            Self::CacheScale { stored, .. } => stored,
        }
    }
}

/// Tensors by canonical names. No name is in both maps.
#[derive(Debug, Default)]
pub(super) struct Catalogue {
    pub(super) weights: BTreeMap<String, Weight>,
    pub(super) values: BTreeMap<String, Value>,
}

/// The stored tensors of a weight.
pub(super) struct Parts {
    pub(super) codes: Stored,
    pub(super) scale: Option<Stored>,
    pub(super) global: Option<Stored>,
    pub(super) input: Option<Stored>,
}

/// Scales that wait for their weights, by the weights' canonical names.
type Waiting = BTreeMap<String, Vec<Stored>>;

/// The tensors sorted into kinds.
#[derive(Default)]
struct Sorted {
    codes: BTreeMap<String, Stored>,
    scales: Waiting,
    globals: Waiting,
    inputs: Waiting,
    found: Catalogue,
}

impl Files {
    /// Sorts all tensors and checks that they fit together.
    pub(super) fn catalogue(&self, options: &OpenOptions) -> Result<Catalogue> {
        self.catalogue_with(options, &mut |error, _| Err(error))
    }

    /// As [`Files::catalogue`]. `fault` gets every error and the stored name of the tensor where it occurred, which is left out if `fault`
    /// returns Ok.
    pub(super) fn catalogue_with(
        &self,
        options: &OpenOptions,
        fault: &mut dyn FnMut(Error, &str) -> Result<()>,
    ) -> Result<Catalogue> {
        let mut sorted = Sorted::default();
        let names: BTreeMap<_, _> = self.index.iter().collect();
        for (name, file) in names {
            let sorted = self.sort(name, *file, &mut sorted);
            sorted.or_else(|error| fault(error, name))?;
        }
        for (name, codes) in std::mem::take(&mut sorted.codes) {
            let stored = codes.name.clone();
            let joined = self.join_scales(name, codes, &mut sorted, options);
            joined.or_else(|error| fault(error, &stored))?;
        }
        let Sorted {
            scales,
            globals,
            inputs,
            mut found,
            ..
        } = sorted;
        for (weight, scales) in scales.into_iter().chain(globals) {
            for scale in scales {
                fault(self.stray(&weight, &scale, &found), &scale.name)?;
            }
        }
        for (weight, scales) in inputs {
            for scale in scales {
                // Without a configuration the name alone is weak evidence.
                if self.family(&scale).source.is_some() {
                    fault(self.stray(&weight, &scale, &found), &scale.name)?;
                    continue;
                }
                let name = scale.name.clone();
                let inserted = self.insert(&mut found, name.clone(), Value::Tensor(scale));
                inserted.or_else(|error| fault(error, &name))?;
            }
        }
        Ok(found)
    }

    /// Puts codes into the catalogue together with their scales.
    fn join_scales(
        &self,
        name: String,
        codes: Stored,
        sorted: &mut Sorted,
        options: &OpenOptions,
    ) -> Result<()> {
        let Sorted {
            scales,
            globals,
            inputs,
            found,
            ..
        } = sorted;
        let (path, own) = split(&name);
        let is_layer = own == "weight";
        // The scales of a table, which is not the weight of a linear layer.
        if !is_layer {
            for end in ["_scale", "_scale_inv"] {
                if let Some(Value::Tensor(scale)) = found.values.remove(&format!("{name}{end}")) {
                    scales.entry(name.clone()).or_default().push(scale);
                }
            }
        }
        let (scale, input) = (scales.remove(&name), inputs.remove(&name));
        let scale = self.one(&format!("{name}_scale"), scale)?;
        let global = self.one(&format!("{name}_global_scale"), globals.remove(&name))?;
        let input = match is_layer {
            true => self.one(&join(path, "input_scale"), input)?,
            false => None,
        };
        if self.family(&codes).is_unscaled && scale.is_none() {
            let is_matrix = is_layer && self.shape(&codes).len() == 2;
            if !is_matrix || self.dtype(&codes) != Some(Dtype::F8_E4M3) {
                return self.insert(found, name, Value::Codes(codes));
            }
        }
        let parts = Parts {
            codes,
            scale,
            global,
            input,
        };
        let weight = self.weight(&name, parts, options)?;
        if let Some(other) = found.values.get(&name) {
            return Err(self.ambiguous(&name, other.stored(), &weight.codes));
        }
        found.weights.insert(name, weight);
        Ok(())
    }

    fn insert(&self, found: &mut Catalogue, name: String, value: Value) -> Result<()> {
        let weight = found.weights.get(&name).map(|weight| &weight.codes);
        if let Some(other) = found.values.get(&name).map(Value::stored).or(weight) {
            return Err(self.ambiguous(&name, other, value.stored()));
        }
        found.values.insert(name, value);
        Ok(())
    }

    /// Finds out what kind of tensor the stored `name` is.
    fn sort(&self, name: &str, file: usize, sorted: &mut Sorted) -> Result<()> {
        let family = &self.families[file];
        let (canonical, order) = (family.rename)(name);
        let stored = Stored {
            file,
            name: name.to_string(),
            order,
        };
        let Some(dtype) = self.dtype(&stored) else {
            return Ok(());
        };
        refuse::tensor(self.path(&stored), name, dtype, family)?;
        let (path, own) = split(&canonical);
        if own == "_extra_state" || family.descriptions.contains(&split(name).1) {
            tracing::info!(tensor = name, "skipped: no part of the model's values");
            return Ok(());
        }
        if let "weight_zero_point" | "input_zero_point" | "output_zero_point" = own {
            return self.check_zero_point(&stored);
        }
        let cache = kv_names::canonical_names(&canonical);
        if !cache.is_empty() {
            let shape = self.cache_scale_shape(&stored)?;
            for name in cache {
                if let Some(Value::CacheScale { stored: other, .. }) =
                    sorted.found.values.get(&name)
                {
                    self.check_same_scale(other, &stored)?;
                    continue;
                }
                let (stored, shape) = (stored.clone(), shape.clone());
                let value = Value::CacheScale { stored, shape };
                self.insert(&mut sorted.found, name, value)?;
            }
            return Ok(());
        }
        let weight = weight_name(path);
        let has_weight = || self.index.contains_key(&weight);
        let waiting = if family.weight_scales.contains(&own) && (own != "scale" || has_weight()) {
            Some(&mut sorted.scales)
        } else if family.global(own).is_some() {
            Some(&mut sorted.globals)
        } else if family.input_scales.contains(&own) {
            Some(&mut sorted.inputs)
        } else {
            None
        };
        if let Some(waiting) = waiting {
            waiting.entry(weight).or_default().push(stored);
            return Ok(());
        }
        let canonical = match dtype {
            Dtype::F8_E4M3 | Dtype::F8_E5M2 => canonical,
            Dtype::U32 if family.packs_words && own == "weight" => canonical,
            _ if family.packs(own, dtype) => weight,
            _ => return self.insert(&mut sorted.found, canonical, Value::Tensor(stored)),
        };
        if let Some(other) = sorted.codes.get(&canonical) {
            return Err(self.ambiguous(&canonical, other, &stored));
        }
        sorted.codes.insert(canonical, stored);
        Ok(())
    }

    /// Checks that the zero point of symmetric scales, if there is one, is 0.
    fn check_zero_point(&self, stored: &Stored) -> Result<()> {
        let bytes = self.file(stored).bytes(&stored.name)?;
        let dtype = self.dtype(stored);
        let is_float = matches!(
            dtype,
            Some(
                Dtype::F8_E4M3
                    | Dtype::F8_E5M2
                    | Dtype::F16
                    | Dtype::BF16
                    | Dtype::F32
                    | Dtype::F64
            )
        );
        let width = (bytes.len() / self.shape(stored).iter().product::<usize>().max(1)).max(1);
        // Only a float has a zero with a sign, which is in the last byte of each number.
        let is_zero = |at: usize, byte: u8| match is_float && at % width == width - 1 {
            true => byte & 0x7F == 0,
            false => byte == 0,
        };
        let mut positions = bytes.iter().enumerate();
        let Some(at) = positions.position(|(at, byte)| !is_zero(at, *byte)) else {
            return Ok(());
        };
        let value = match dtype {
            Some(Dtype::I8) => f64::from(bytes[at] as i8),
            _ => f64::from(bytes[at]),
        };
        let expected = "0, since FP8 scales are symmetric";
        Err(self
            .file(stored)
            .wrong_value(&stored.name, at / width, value, expected))
    }

    /// The error for a scale whose weight is missing or not FP8.
    fn stray(&self, weight: &str, scale: &Stored, found: &Catalogue) -> Error {
        let value = found.values.get(weight);
        let dtype = value.and_then(|value| self.dtype(value.stored()));
        let path = self.path(scale).display();
        Error::TensorDType {
            tensor: weight.to_string(),
            got: dtype.map_or("missing".into(), |dtype| format!("{dtype:?}")),
            expected: format!("F8_E4M3 beside `{}`, in {path}", scale.name),
        }
    }

    /// The only scale with that canonical name.
    fn one(&self, name: &str, scales: Option<Vec<Stored>>) -> Result<Option<Stored>> {
        let mut scales = scales.unwrap_or_default().into_iter();
        match (scales.next(), scales.next()) {
            (Some(first), Some(second)) => Err(self.ambiguous(name, &first, &second)),
            (scale, _) => Ok(scale),
        }
    }
}
