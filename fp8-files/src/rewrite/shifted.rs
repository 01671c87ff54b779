//! A model whose norms and the layers after them are multiplied by factors, as the input of a rewrite.

use super::source::Source;
use crate::error::{Error, Result};
use crate::search::shifted;
use candle_core::{DType, Tensor};
use fp8_candle::Fp8Tensor;
use fp8_core::Granularity;
use safetensors::Dtype;
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

/// A model in which some tensors are multiplied by a factor for each feature along their last dimension:
/// [`Chosen::shifts`](crate::search::Chosen::shifts). [`quantize`](super::quantize) reads its source through it.
///
/// ```
/// use candle_core::DType;
/// use fp8_files::load::Checkpoint;
/// use fp8_files::rewrite::{Shifted, Source};
/// # let dir = tempfile::tempdir()?;
/// # fp8_test_support::files::plain_model(dir.path());
/// let model = Checkpoint::open_dir(dir.path())?; // with a linear layer `fc`
/// # let features = model.shape("fc.weight").unwrap()[1];
/// let shifts = [("fc.weight".to_string(), vec![2f32; features])].into();
/// let doubled = Shifted::new(&model, &shifts)?;
/// let sum = |source: &dyn Source| -> Result<f32, fp8_files::Error> { Ok(source.value("fc.weight", DType::F32)?.sum_all()?.to_scalar::<f32>()?) };
/// assert_eq!(sum(&doubled)?, 2. * sum(&model)?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Shifted<'a> {
    source: &'a dyn Source,
    shifts: &'a BTreeMap<String, Vec<f32>>,
}

impl<'a> Shifted<'a> {
    /// `source` with these factors by the name of the tensor.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] if `source` lacks one of the tensors, [`Error::TensorShape`] if its last dimension has another size, and
    /// [`Error::TensorValue`] for a factor that is not positive and finite.
    pub fn new(source: &'a dyn Source, shifts: &'a BTreeMap<String, Vec<f32>>) -> Result<Self> {
        for (name, shift) in shifts {
            let shape = source.shape(name).ok_or_else(|| Error::MissingTensor {
                tensor: name.clone(),
                place: "the model that is to be shifted".into(),
            })?;
            if shape.last() != Some(&shift.len()) {
                return Err(Error::TensorShape {
                    tensor: name.clone(),
                    got: shape,
                    expected: format!("{} features, one for each factor", shift.len()),
                });
            }
            let is_factor = |factor: &f32| *factor > 0. && factor.is_finite();
            if let Some(index) = shift.iter().position(|factor| !is_factor(factor)) {
                return Err(Error::TensorValue {
                    tensor: format!("{name}, its shift"),
                    index,
                    value: shift[index].into(),
                    expected: "a factor, positive and finite".into(),
                });
            }
        }
        Ok(Self { source, shifts })
    }

    /// `value`, some rows of the tensor `name` or all of it, after its shift.
    fn after(&self, name: &str, value: Tensor) -> Result<Tensor> {
        match self.shifts.get(name) {
            Some(shift) => shifted(&value, shift),
            None => Ok(value),
        }
    }
}

impl Source for Shifted<'_> {
    fn names(&self) -> Vec<String> {
        self.source.names()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.source.shape(name)
    }

    fn dtype(&self, name: &str) -> Option<DType> {
        self.source.dtype(name)
    }

    fn raw_dtype(&self, name: &str) -> Option<Dtype> {
        // A factor needs values.
        match self.shifts.contains_key(name) {
            true => None,
            false => self.source.raw_dtype(name),
        }
    }

    fn raw_bytes(&self, name: &str, bytes: Range<usize>) -> Result<Vec<u8>> {
        self.source.raw_bytes(name, bytes)
    }

    fn is_fp8(&self, name: &str) -> bool {
        self.source.is_fp8(name)
    }

    fn codes(&self, name: &str, granularity: Granularity) -> Result<Option<Fp8Tensor>> {
        match self.shifts.contains_key(name) {
            true => Ok(None),
            false => self.source.codes(name, granularity),
        }
    }

    fn update(&self, name: &str) -> Result<Option<Tensor>> {
        let update = self.source.update(name)?;
        update.map(|update| self.after(name, update)).transpose()
    }

    fn merged_adapters(&self) -> Result<Vec<String>> {
        self.source.merged_adapters()
    }

    fn value(&self, name: &str, dtype: DType) -> Result<Tensor> {
        self.after(name, self.source.value(name, dtype)?)
    }

    fn rows(&self, name: &str, rows: Range<usize>, dtype: DType) -> Result<Option<Tensor>> {
        let rows = self.source.rows(name, rows, dtype)?;
        rows.map(|rows| self.after(name, rows)).transpose()
    }

    fn config(&self) -> Option<&Value> {
        self.source.config()
    }

    fn directory(&self) -> Option<PathBuf> {
        self.source.directory()
    }

    fn files(&self) -> Result<BTreeMap<String, Value>> {
        self.source.files()
    }

    fn tied(&self) -> BTreeMap<String, String> {
        self.source.tied()
    }
}
