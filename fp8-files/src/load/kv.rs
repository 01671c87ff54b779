//! Checks of the scales of KV caches.

use super::catalogue::{FLOATS, FLOATS_TEXT, Source, Stored};
use crate::error::{Error, Result};
use candle_core::{DType, Device};

impl Source<'_> {
    /// One number, or one per head.
    pub(super) fn cache_scale_shape(&self, stored: &Stored) -> Result<Vec<usize>> {
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

    /// Some writers give a cache's scale under two names, for engines that know one of them: the numbers have to be equal.
    pub(super) fn check_same_scale(&self, first: &Stored, second: &Stored) -> Result<()> {
        let numbers = |stored: &Stored| -> Result<Vec<f32>> {
            let scale = self.file(stored).tensor(&stored.name, &Device::Cpu)?;
            Ok(scale.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
        };
        let (one, other) = (numbers(first)?, numbers(second)?);
        if one.len() != other.len() {
            return Err(self.ambiguous(&second.name, first, second));
        }
        let differ = |(one, other): (&f32, &f32)| one != other;
        match one.iter().zip(&other).position(differ) {
            None => Ok(()),
            Some(index) => Err(Error::TensorValue {
                tensor: second.name.clone(),
                index,
                value: f64::from(other[index]),
                expected: format!(
                    "{}, as `{}` says, which is the same scale, in {}",
                    one[index],
                    first.name,
                    self.path(second).display()
                ),
            }),
        }
    }
}
