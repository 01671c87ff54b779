//! What is in a set of files, by canonical names: FP8 weights with their scales, and everything else.
//!
//! A family only says what it calls things and how its configuration wants each layer. All checks are made here, the same
//! for every family: a weight has its scale, a scale its weight, configuration and file agree.

use super::family::{Family, Order, ScaleLayout};
use super::kv;
use super::names::{join, split, weight_name};
use super::options::{Inputs, OpenOptions};
use super::refuse;
use super::scheme::{InputScheme, LayerScheme, granularity_by_shape, grid, has_shape, shapes_text};
use crate::error::{Error, Result};
use crate::safetensors_file::SafetensorsFile;
use fp8_core::Granularity;
use safetensors::Dtype;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Dtypes of scales that are numbers.
pub(super) const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::BF16, Dtype::F16];
const FLOATS_TEXT: &str = "F32, BF16 or F16";

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

/// Anything that is no FP8 weight and no scale of one.
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
    fn family(&self, stored: &Stored) -> &dyn Family {
        self.families[stored.file].as_ref()
    }

    fn file(&self, stored: &Stored) -> &SafetensorsFile {
        &self.files[stored.file]
    }

    fn path(&self, stored: &Stored) -> &Path {
        self.file(stored).path()
    }

    fn dtype(&self, stored: &Stored) -> Option<Dtype> {
        self.file(stored).dtype(&stored.name)
    }

    fn shape(&self, stored: &Stored) -> &[usize] {
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
        let cache = kv::canonical_names(&canonical);
        if !cache.is_empty() {
            let shape = self.cache_scale_shape(&stored)?;
            for name in cache {
                let (stored, shape) = (stored.clone(), shape.clone());
                let value = Value::CacheScale { stored, shape };
                self.insert(&mut sorted.found, name, value)?;
            }
            return Ok(());
        }
        if family.weight_scale_names().contains(&own) && !(own == "scale" && !self.has_weight(path))
        {
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
        match bytes.iter().position(|byte| byte & 0x7F != 0) {
            None => Ok(()),
            Some(at) => Err(Error::TensorValue {
                tensor: stored.name.clone(),
                index: at
                    / (bytes.len() / self.shape(stored).iter().product::<usize>().max(1)).max(1),
                value: f64::from(bytes[at]),
                expected: format!(
                    "0, since FP8 scales are symmetric, in {}",
                    self.path(stored).display()
                ),
            }),
        }
    }

    fn cache_scale_shape(&self, stored: &Stored) -> Result<Vec<usize>> {
        self.check_dtype(stored, &FLOATS, FLOATS_TEXT)?;
        match self.shape(stored) {
            [] => Ok(vec![1]),
            [heads, rest @ ..] if *heads > 0 && rest.iter().all(|size| *size == 1) => {
                Ok(vec![*heads])
            }
            shape => Err(Error::TensorShape {
                tensor: stored.name.clone(),
                got: shape.to_vec(),
                expected: format!("[1] or [heads, 1, 1], in {}", self.path(stored).display()),
            }),
        }
    }

    fn check_dtype(&self, stored: &Stored, allowed: &[Dtype], text: &str) -> Result<()> {
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

    /// Brings together what belongs to one weight.
    fn weight(
        &self,
        name: &str,
        codes: Stored,
        scale: Option<Stored>,
        input: Option<Stored>,
        options: &OpenOptions,
    ) -> Result<Weight> {
        let family = self.family(&codes);
        let (path, own) = split(name);
        let scheme = match own {
            "weight" => family.layer(path)?.ok_or_else(|| {
                let found = format!(
                    "`{}` in {} holds FP8 values",
                    codes.name,
                    self.path(&codes).display()
                );
                mismatch(path, family, "leaves it in high precision", found)
            })?,
            // Not a linear layer's, so no configuration speaks of it.
            _ => LayerScheme::default(),
        };
        if scale.is_none() && !family.is_unscaled() {
            return Err(Error::MissingScale {
                tensor: codes.name.clone(),
                missing: self.scale_name(&codes, name),
                path: Some(self.path(&codes).to_path_buf()),
            });
        }
        if !family.packs_words() {
            self.check_dtype(&codes, &[Dtype::F8_E4M3], "F8_E4M3")?;
        }
        let shape = self.code_shape(&codes)?;
        let granularity = match &scale {
            None => Granularity::Tensorwise,
            Some(scale) => self.granularity(&codes, &shape, scale, scheme.weight, path)?,
        };
        if let Some(input) = &input {
            self.check_dtype(input, &FLOATS, FLOATS_TEXT)?;
            let shape = self.shape(input);
            if shape.iter().product::<usize>() != 1 {
                return Err(Error::TensorShape {
                    tensor: input.name.clone(),
                    got: shape.to_vec(),
                    expected: format!("one element, in {}", self.path(input).display()),
                });
            }
        }
        let input_scheme = match (scheme.input, &input) {
            (Some(InputScheme::Static), None) => {
                let config = family.source().map(|path| path.display().to_string());
                let files = self.path(&codes).display();
                return Err(Error::MissingTensor {
                    tensor: join(path, family.input_scale_names()[0]),
                    place: match config {
                        Some(config) => format!("{files}, though {config} says static inputs,"),
                        None => files.to_string(),
                    },
                });
            }
            (Some(scheme), Some(input))
                if scheme != InputScheme::Static && !family.may_ignore_input_scales() =>
            {
                let says = "gives its inputs no static scale";
                let found = format!(
                    "there is `{}` in {}",
                    input.name,
                    self.path(input).display()
                );
                return Err(mismatch(path, family, says, found));
            }
            (Some(scheme), _) => scheme,
            (None, Some(_)) => InputScheme::Static,
            (None, None) if scale.is_none() => InputScheme::None,
            (None, None) => InputScheme::PerToken,
        };
        let input_scheme = match options.inputs {
            Inputs::AsStored => input_scheme,
            Inputs::WeightOnly => InputScheme::None,
            Inputs::Groups(size) => InputScheme::PerGroup(size.max(1)),
        };
        Ok(Weight {
            layout: family.scale_layout(path),
            codes,
            shape,
            scale,
            input,
            granularity,
            input_scheme,
            power_of_two_inputs: scheme.power_of_two_inputs,
            amax_bound: scheme.amax_bound,
        })
    }

    /// The only scale of that canonical name.
    fn one(&self, name: &str, scales: Option<Vec<Stored>>) -> Result<Option<Stored>> {
        let mut scales = scales.unwrap_or_default().into_iter();
        match (scales.next(), scales.next()) {
            (Some(first), Some(second)) => Err(self.ambiguous(name, &first, &second)),
            (scale, _) => Ok(scale),
        }
    }

    fn ambiguous(&self, name: &str, first: &Stored, second: &Stored) -> Error {
        Error::Ambiguous {
            path: self.path(second).to_path_buf(),
            tensor: name.to_string(),
            first: first.name.clone(),
            second: second.name.clone(),
        }
    }

    /// The name under which a family would keep the scale of a weight.
    fn scale_name(&self, codes: &Stored, name: &str) -> String {
        match split(name) {
            (_, "weight") => {
                let own = self.family(codes).weight_scale_names()[0];
                let (path, stored) = split(&codes.name);
                match stored {
                    "weight" => join(path, own),
                    _ => format!("the {own} of {name}"),
                }
            }
            _ => format!("{name}_scale"),
        }
    }

    /// `[N, K]` of a weight.
    fn code_shape(&self, codes: &Stored) -> Result<Vec<usize>> {
        let shape = self.shape(codes);
        let &[n, k] = shape else {
            return Err(Error::TensorShape {
                tensor: codes.name.clone(),
                got: shape.to_vec(),
                expected: format!(
                    "two dimensions for an FP8 weight, in {}",
                    self.path(codes).display()
                ),
            });
        };
        let words = self.dtype(codes) == Some(Dtype::U32);
        let k = if words { k.saturating_mul(4) } else { k };
        if let Order::Rotary { heads } = codes.order
            && (heads == 0 || !n.is_multiple_of(heads.saturating_mul(2)))
        {
            return Err(Error::TensorShape {
                tensor: codes.name.clone(),
                got: shape.to_vec(),
                expected: format!(
                    "rows in pairs for {heads} heads, in {}",
                    self.path(codes).display()
                ),
            });
        }
        Ok(vec![n, k])
    }

    /// Which elements of an FP8 weight share a scale, held against shape and dtype in the file.
    fn granularity(
        &self,
        codes: &Stored,
        shape: &[usize],
        scale: &Stored,
        told: Option<Granularity>,
        path: &str,
    ) -> Result<Granularity> {
        let (n, k) = (shape[0], shape[1]);
        let dims = self.shape(scale);
        let bytes = matches!(self.dtype(scale), Some(Dtype::U8 | Dtype::F8_E8M0));
        let wrong_shape = || Error::TensorShape {
            tensor: scale.name.clone(),
            got: dims.to_vec(),
            expected: format!(
                "{} `{}`, in {}",
                shapes_text(told, n, k),
                codes.name,
                self.path(scale).display()
            ),
        };
        let granularity = match told {
            Some(told) => told,
            // Bytes along rows of 32 are the microscaling of OCP.
            None if bytes && has_shape(dims, Granularity::Mx, n, k) => Granularity::Mx,
            None => {
                let found = granularity_by_shape(dims, n, k);
                // Where there are blocks a configuration tells their size.
                let is_told = |found: &Granularity| {
                    self.family(codes).source().is_none()
                        || !matches!(found, Granularity::Blockwise { .. })
                };
                found.filter(is_told).ok_or_else(wrong_shape)?
            }
        };
        let fits = match self.family(codes).scale_layout(path) {
            ScaleLayout::RowMajor => {
                has_shape(dims, granularity, n, k) || is_padded(dims, granularity, n, k)
            }
            ScaleLayout::Tiles => {
                let (rows, cols) = grid(granularity, n, k);
                dims == [rows.next_multiple_of(128), cols.next_multiple_of(4)]
            }
        };
        if !fits {
            return Err(wrong_shape());
        }
        let (allowed, text): (&[Dtype], _) = match granularity {
            Granularity::Mx => (&[Dtype::U8, Dtype::F8_E8M0], "U8 or F8_E8M0"),
            Granularity::Blockwise { .. } => (
                &[
                    Dtype::F32,
                    Dtype::BF16,
                    Dtype::F16,
                    Dtype::F8_E8M0,
                    Dtype::U8,
                ],
                "F32, BF16, F16, F8_E8M0 or U8",
            ),
            _ => (
                &[Dtype::F32, Dtype::BF16, Dtype::F16, Dtype::F8_E8M0],
                "F32, BF16, F16 or F8_E8M0",
            ),
        };
        self.check_dtype(scale, allowed, text)?;
        Ok(granularity)
    }
}

/// Whether a grid of block scales goes beyond the weight by less than a tile of four: some writers pad it.
pub(super) fn is_padded(dims: &[usize], granularity: Granularity, n: usize, k: usize) -> bool {
    let (Granularity::Blockwise { .. }, &[r, c]) = (granularity, dims) else {
        return false;
    };
    let (rows, cols) = grid(granularity, n, k);
    let padded = |got: usize, needed: usize| {
        [1, 2, 4, 8, 16, 128]
            .iter()
            .any(|tile| got == needed.next_multiple_of(*tile))
    };
    rows > 0 && cols > 0 && padded(r, rows) && padded(c, cols)
}

fn first(waiting: &Waiting) -> Option<(&str, &Stored)> {
    let (name, scales) = waiting.iter().next()?;
    Some((name, scales.first()?))
}

fn mismatch(path: &str, family: &dyn Family, says: &str, found: String) -> Error {
    Error::SchemeMismatch {
        layer: path.to_string(),
        path: family.source().map_or_else(PathBuf::new, Path::to_path_buf),
        says: says.to_string(),
        found,
    }
}

fn wrong_dtype(name: &str, got: Option<Dtype>, expected: &str, path: &Path) -> Error {
    Error::TensorDType {
        tensor: name.to_string(),
        got: got.map_or("missing".into(), |got| format!("{got:?}")),
        expected: format!("{expected}, in {}", path.display()),
    }
}
