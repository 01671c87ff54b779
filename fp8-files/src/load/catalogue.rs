//! What is in a set of files, by canonical names: FP8 weights with their scales, and everything else.
//!
//! A family only says what it calls things and how its configuration wants each layer. All checks are made here, the same
//! for every family: a weight has its scale, a scale its weight, configuration and file agree.

use super::family::{Family, Order, ScaleLayout};
use super::kv_names;
use super::options::OpenOptions;
use super::refuse;
use crate::error::{Error, Result};
use crate::names::{join, split, weight_name};
use crate::safetensors_file::SafetensorsFile;
use crate::scheme::{InputScheme, LayerScheme};
use fp8_core::Granularity;
use safetensors::Dtype;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

/// Dtypes of scales that are numbers.
pub(super) const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::BF16, Dtype::F16];
pub(super) const FLOATS_TEXT: &str = "F32, BF16 or F16";

/// A tensor in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) file: usize,
    pub(super) name: String,
    pub(super) order: Order,
}

/// An FP8 weight and what is known of it.
#[derive(Debug)]
pub(super) struct Weight {
    pub(super) codes: Stored,
    /// `[N, K]`.
    pub(super) shape: Vec<usize>,
    /// None where the codes are the values.
    pub(super) scale: Option<Stored>,
    pub(super) layout: ScaleLayout,
    pub(super) input: Option<Stored>,
    pub(super) granularity: Granularity,
    pub(super) input_scheme: InputScheme,
    pub(super) power_of_two_inputs: bool,
    pub(super) amax_bound: Option<f32>,
}

impl Weight {
    /// Everything about it told.
    pub(super) fn scheme(&self) -> LayerScheme {
        LayerScheme {
            weight: Some(self.granularity),
            input: Some(self.input_scheme),
            power_of_two_inputs: self.power_of_two_inputs,
            amax_bound: self.amax_bound,
        }
    }
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

/// By canonical names.
#[derive(Debug, Default)]
pub(super) struct Catalogue {
    pub(super) weights: BTreeMap<String, Weight>,
    pub(super) values: BTreeMap<String, Value>,
    /// Tensors of a layer's state that no model needs: names as stored.
    pub(super) skipped: Vec<String>,
}

/// The files, the family of each, and which file counts for a name.
pub(super) struct Source<'a> {
    pub(super) files: &'a [SafetensorsFile],
    pub(super) families: &'a [Arc<dyn Family>],
    pub(super) index: &'a HashMap<String, usize>,
}

/// Scales that wait for their weights, by the weights' canonical names.
type Waiting = BTreeMap<String, Vec<Stored>>;

/// The tensors sorted into kinds.
#[derive(Default)]
struct Sorted {
    codes: BTreeMap<String, Stored>,
    scales: Waiting,
    /// By path.
    inputs: Waiting,
    found: Catalogue,
}

impl Source<'_> {
    pub(super) fn family(&self, stored: &Stored) -> &dyn Family {
        self.families[stored.file].as_ref()
    }

    pub(super) fn file(&self, stored: &Stored) -> &SafetensorsFile {
        &self.files[stored.file]
    }

    pub(super) fn path(&self, stored: &Stored) -> &Path {
        self.file(stored).path()
    }

    pub(super) fn dtype(&self, stored: &Stored) -> Option<Dtype> {
        self.file(stored).dtype(&stored.name)
    }

    pub(super) fn shape(&self, stored: &Stored) -> &[usize] {
        self.file(stored).shape(&stored.name).unwrap_or_default()
    }

    /// Sorts all tensors and checks that everything belongs together.
    pub(super) fn catalogue(&self, options: &OpenOptions) -> Result<Catalogue> {
        let mut sorted = Sorted::default();
        let mut names: Vec<(&String, usize)> =
            self.index.iter().map(|(name, &at)| (name, at)).collect();
        names.sort_unstable();
        for (name, file) in names {
            self.sort(name, file, &mut sorted)?;
        }
        let Sorted {
            codes,
            mut scales,
            mut inputs,
            mut found,
        } = sorted;
        for (name, codes) in codes {
            // A table beside the linear layers.
            if split(&name).1 != "weight" {
                for end in ["_scale", "_scale_inv"] {
                    if let Some(Value::Tensor(scale)) = found.values.remove(&format!("{name}{end}"))
                    {
                        scales.entry(name.clone()).or_default().push(scale);
                    }
                }
            }
            let scale = self.one(&format!("{name}_scale"), scales.remove(&name))?;
            let input = match split(&name) {
                (path, "weight") => self.one(&join(path, "input_scale"), inputs.remove(path))?,
                _ => None,
            };
            if self.family(&codes).is_unscaled() && scale.is_none() {
                let is_layer = split(&name).1 == "weight" && self.shape(&codes).len() == 2;
                if !is_layer || self.dtype(&codes) != Some(Dtype::F8_E4M3) {
                    self.insert(&mut found, name, Value::Codes(codes))?;
                    continue;
                }
            }
            let weight = self.weight(&name, codes, scale, input, options)?;
            if let Some(other) = found.values.get(&name) {
                return Err(self.ambiguous(&name, other.stored(), &weight.codes));
            }
            found.weights.insert(name, weight);
        }
        if let Some((weight, scale)) = first(&scales) {
            return Err(self.stray(weight, scale, &found));
        }
        for (path, scales) in inputs {
            let weight = weight_name(&path);
            for scale in scales {
                // Without a configuration the name alone says little.
                if self.family(&scale).source().is_some() {
                    return Err(self.stray(&weight, &scale, &found));
                }
                let name = scale.name.clone();
                self.insert(&mut found, name, Value::Tensor(scale))?;
            }
        }
        for name in &found.skipped {
            tracing::info!(tensor = name, "skipped: no part of the model's values");
        }
        Ok(found)
    }

    fn insert(&self, found: &mut Catalogue, name: String, value: Value) -> Result<()> {
        let weight = found.weights.get(&name).map(|weight| &weight.codes);
        if let Some(other) = found.values.get(&name).map(Value::stored).or(weight) {
            return Err(self.ambiguous(&name, other, value.stored()));
        }
        found.values.insert(name, value);
        Ok(())
    }

    /// Finds out what kind of tensor it is.
    fn sort(&self, name: &str, file: usize, sorted: &mut Sorted) -> Result<()> {
        let family = self.families[file].as_ref();
        let (canonical, order) = family.rename(name);
        let stored = Stored {
            file,
            name: name.to_string(),
            order,
        };
        let Some(dtype) = self.dtype(&stored) else {
            return Ok(());
        };
        refuse::tensor(self.path(&stored), name, dtype)?;
        let (path, own) = split(&canonical);
        if own == "_extra_state" || family.is_description(name) {
            sorted.found.skipped.push(name.to_string());
            return Ok(());
        }
        if matches!(
            own,
            "weight_zero_point" | "input_zero_point" | "output_zero_point"
        ) {
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
        if family.weight_scale_names().contains(&own) && (own != "scale" || self.has_weight(path)) {
            sorted
                .scales
                .entry(weight_name(path))
                .or_default()
                .push(stored);
            return Ok(());
        }
        if family.input_scale_names().contains(&own) {
            sorted
                .inputs
                .entry(path.to_string())
                .or_default()
                .push(stored);
            return Ok(());
        }
        match dtype {
            Dtype::F8_E4M3 | Dtype::F8_E5M2 => {}
            Dtype::U32 if family.packs_words() && own == "weight" => {}
            _ => return self.insert(&mut sorted.found, canonical, Value::Tensor(stored)),
        }
        if let Some(other) = sorted.codes.get(&canonical) {
            return Err(self.ambiguous(&canonical, other, &stored));
        }
        sorted.codes.insert(canonical, stored);
        Ok(())
    }

    fn has_weight(&self, path: &str) -> bool {
        self.index.contains_key(&weight_name(path))
    }

    /// Symmetric scales have a zero point of 0, if they have any.
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
        match positions.position(|(at, byte)| !is_zero(at, *byte)) {
            None => Ok(()),
            Some(at) => Err(Error::TensorValue {
                tensor: stored.name.clone(),
                index: at / width,
                value: match dtype {
                    Some(Dtype::I8) => f64::from(bytes[at] as i8),
                    _ => f64::from(bytes[at]),
                },
                expected: format!(
                    "0, since FP8 scales are symmetric, in {}",
                    self.path(stored).display()
                ),
            }),
        }
    }

    pub(super) fn check_dtype(&self, stored: &Stored, allowed: &[Dtype], text: &str) -> Result<()> {
        match self.dtype(stored) {
            Some(dtype) if allowed.contains(&dtype) => Ok(()),
            dtype => Err(wrong_dtype(&stored.name, dtype, text, self.path(stored))),
        }
    }

    /// A scale whose weight is missing or no FP8.
    fn stray(&self, weight: &str, scale: &Stored, found: &Catalogue) -> Error {
        let dtype = match found.values.get(weight) {
            Some(value) => self.dtype(value.stored()),
            None => None,
        };
        let expected = format!("F8_E4M3 beside `{}`", scale.name);
        wrong_dtype(weight, dtype, &expected, self.path(scale))
    }

    /// The only scale of that canonical name.
    fn one(&self, name: &str, scales: Option<Vec<Stored>>) -> Result<Option<Stored>> {
        let mut scales = scales.unwrap_or_default().into_iter();
        match (scales.next(), scales.next()) {
            (Some(first), Some(second)) => Err(self.ambiguous(name, &first, &second)),
            (scale, _) => Ok(scale),
        }
    }

    pub(super) fn ambiguous(&self, name: &str, first: &Stored, second: &Stored) -> Error {
        Error::Ambiguous {
            path: self.path(second).to_path_buf(),
            tensor: name.to_string(),
            first: first.name.clone(),
            second: second.name.clone(),
        }
    }
}

fn first(waiting: &Waiting) -> Option<(&str, &Stored)> {
    let (name, scales) = waiting.iter().next()?;
    Some((name, scales.first()?))
}

fn wrong_dtype(name: &str, got: Option<Dtype>, expected: &str, path: &Path) -> Error {
    Error::TensorDType {
        tensor: name.to_string(),
        got: got.map_or("missing".into(), |got| format!("{got:?}")),
        expected: format!("{expected}, in {}", path.display()),
    }
}
