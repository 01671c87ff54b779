//! Reading the tensors of a state, with errors that name what does not fit.

use std::collections::{HashMap, HashSet};

use candle_core::{DType, Device, Shape, Tensor};
use fp8_files::first_outside;

use super::error::{OptimError, Result};

/// Reads the tensors of a state, and remembers which names it has read.
pub struct StateReader<'a> {
    tensors: &'a HashMap<String, Tensor>,
    known: HashSet<String>,
}

impl<'a> StateReader<'a> {
    pub(super) fn new(tensors: &'a HashMap<String, Tensor>) -> Self {
        Self {
            tensors,
            known: HashSet::new(),
        }
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The tensor with this name, dtype and shape, whatever its values are.
    pub(super) fn take_unchecked(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &Shape,
    ) -> Result<&'a Tensor> {
        let tensor = find(self.tensors, name, dtype, shape)?;
        self.know(name);
        Ok(tensor)
    }

    /// The tensor with this name, dtype and shape, whose values must be finite, and not negative if `non_negative`: steps whose gradients
    /// are not finite are skipped, and what overflows keeps the largest number, so moments are finite as long as parameters are.
    pub(super) fn take(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &Shape,
        non_negative: bool,
    ) -> Result<&'a Tensor> {
        let fits = |value: f64| value.is_finite() && !(non_negative && value < 0.0);
        let expected = match non_negative {
            true => "finite and not negative",
            false => "finite",
        };
        self.take_where(name, dtype, shape, fits, expected)
    }

    /// The tensor with this name, dtype and shape, whose values must all fit; `expected` says what does.
    pub(super) fn take_where(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &Shape,
        fits: impl Fn(f64) -> bool,
        expected: &'static str,
    ) -> Result<&'a Tensor> {
        let tensor = self.take_unchecked(name, dtype, shape)?;
        match first_outside(tensor, fits)? {
            None => Ok(tensor),
            Some((index, value)) => Err(OptimError::StateValue {
                name: name.to_string(),
                index,
                value,
                expected,
            }),
        }
    }

    /// Marks a name as read.
    pub(super) fn know(&mut self, name: &str) {
        self.known.insert(name.to_string());
    }

    /// The count with this name: i64, one element.
    pub(super) fn count(&mut self, name: &str) -> Result<u64> {
        self.know(name);
        let tensor = get(self.tensors, name)?;
        check_dtype(name, DType::I64, tensor)?;
        if tensor.elem_count() != 1 {
            return Err(wrong_shape(name, &().into(), tensor));
        }
        let got = tensor.flatten_all()?.to_vec1::<i64>()?[0];
        u64::try_from(got).map_err(|_| OptimError::NegativeStep {
            name: name.to_string(),
            got,
        })
    }

    /// Fails if the state has a tensor that was not read; names the first one in alphabetical order.
    pub(super) fn finish(self) -> Result<()> {
        let unexpected = (self.tensors.keys()).filter(|name| !self.known.contains(*name));
        match unexpected.min() {
            None => Ok(()),
            Some(name) => Err(OptimError::UnexpectedState { name: name.clone() }),
        }
    }
}

/// A count as [`StateReader::count`] reads it.
pub(super) fn count_tensor(count: u64) -> Result<Tensor> {
    let count = i64::try_from(count).unwrap_or(i64::MAX);
    Ok(Tensor::new(count, &Device::Cpu)?)
}

fn get<'a>(tensors: &'a HashMap<String, Tensor>, name: &str) -> Result<&'a Tensor> {
    tensors.get(name).ok_or_else(|| OptimError::MissingState {
        name: name.to_string(),
    })
}

pub(super) fn find<'a>(
    tensors: &'a HashMap<String, Tensor>,
    name: &str,
    dtype: DType,
    shape: &Shape,
) -> Result<&'a Tensor> {
    let tensor = get(tensors, name)?;
    if tensor.shape() != shape {
        return Err(wrong_shape(name, shape, tensor));
    }
    check_dtype(name, dtype, tensor)?;
    Ok(tensor)
}

fn wrong_shape(name: &str, expected: &Shape, got: &Tensor) -> OptimError {
    OptimError::StateShape {
        name: name.to_string(),
        expected: expected.clone(),
        got: got.shape().clone(),
    }
}

fn check_dtype(name: &str, expected: DType, tensor: &Tensor) -> Result<()> {
    let got = tensor.dtype();
    if got == expected {
        return Ok(());
    }
    Err(OptimError::StateDtype {
        name: name.to_string(),
        expected,
        got,
    })
}
