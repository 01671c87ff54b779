//! Scaled tensors by name.

use super::dtype::ScaledDType;
use super::error::Result;
use super::options::{ScaledOptions, scaled_scope};
use super::value::{Scaled, as_scaled};
use candle_core::{DType, Tensor};
use fp8_core::scaled::{Scale, ScaleCheck};
use fp8_files::Error as FilesError;
use std::collections::BTreeMap;

/// Named scaled tensors, in the order of their names.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fp8_scaled::ScaledTree;
/// let batch = [("x".to_string(), Tensor::new(&[3f32, 6.0], &Device::Cpu)?)];
/// let tree = ScaledTree::as_scaled(batch, 2.0)?.astype(DType::F16)?;
/// assert_eq!(tree.get("x").unwrap().data()?.dtype(), DType::F16);
/// let values = tree.to_tensors(DType::F32)?;
/// assert_eq!(values["x"].to_vec1::<f32>()?, [3.0, 6.0]);
/// # Ok::<(), fp8_scaled::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct ScaledTree(BTreeMap<String, Scaled>);

/// Data with the scale of an existing tensor, which may be 0.
pub(crate) fn with_scale(data: &Tensor, scale: Scale) -> Result<Scaled> {
    if scale.is_zero() {
        return Scaled::zeros(data.shape(), data.dtype(), data.device());
    }
    // A lenient check may have accepted it.
    let options = ScaledOptions::default().with_check(ScaleCheck::Lenient);
    let _scope = (!scale.is_power_of_two()).then(|| scaled_scope(options));
    Scaled::from_parts(data, scale.to_f32())
}

impl ScaledTree {
    /// Plain tensors with a scale each: `data = x / scale`, or the tensor itself and the scale 1 without one.
    ///
    /// # Errors
    /// [`FilesError::NameClash`](fp8_files::Error::NameClash) if a name occurs twice; if a tensor holds integers or the scale is invalid.
    pub fn as_scaled(
        tensors: impl IntoIterator<Item = (String, Tensor)>,
        scale: impl Into<Option<f32>>,
    ) -> Result<Self> {
        let scale = scale.into();
        let mut tree = BTreeMap::new();
        for (name, tensor) in tensors {
            let value = as_scaled(&tensor, scale)?;
            if tree.insert(name.clone(), value).is_some() {
                return Err(FilesError::NameClash { tensor: name }.into());
            }
        }
        Ok(Self(tree))
    }

    /// Inserts a value and returns the previous one of this name.
    pub fn insert(&mut self, name: impl Into<String>, value: Scaled) -> Option<Scaled> {
        self.0.insert(name.into(), value)
    }

    /// The value of this name.
    pub fn get(&self, name: &str) -> Option<&Scaled> {
        self.0.get(name)
    }

    /// Names and values, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Scaled)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// The number of values.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the tree is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Applies `f` to every value.
    ///
    /// # Errors
    /// The first error of `f`.
    pub fn map(&self, f: impl Fn(&Scaled) -> Result<Scaled>) -> Result<Self> {
        let values = self.0.iter();
        let values = values.map(|(name, value)| Ok((name.clone(), f(value)?)));
        Ok(Self(values.collect::<Result<_>>()?))
    }

    /// Data of another dtype, rounded once; scales stay.
    ///
    /// # Errors
    /// If scaled data cannot have this dtype.
    pub fn astype(&self, dtype: impl Into<ScaledDType>) -> Result<Self> {
        let dtype = dtype.into();
        self.map(|value| value.astype(dtype))
    }

    /// The values as plain tensors, `data * scale` rounded once to `dtype`, for programs without support for scales.
    ///
    /// # Errors
    /// If `dtype` is not f32, bf16, f16 or f64.
    pub fn to_tensors(&self, dtype: DType) -> Result<BTreeMap<String, Tensor>> {
        let values = self.0.iter();
        let values = values.map(|(name, value)| Ok((name.clone(), value.to_tensor(dtype)?)));
        values.collect()
    }
}

impl FromIterator<(String, Scaled)> for ScaledTree {
    /// Of two values with one name the later is kept.
    fn from_iter<I: IntoIterator<Item = (String, Scaled)>>(values: I) -> Self {
        Self(values.into_iter().collect())
    }
}

impl IntoIterator for ScaledTree {
    type Item = (String, Scaled);
    type IntoIter = std::collections::btree_map::IntoIter<String, Scaled>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}
