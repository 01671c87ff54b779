//! Checks of the scales of KV caches.

use super::files::{FLOATS, Files, Stored};
use crate::error::Result;

impl Files {
    /// The shape of a cache scale: one number, or one per head.
    pub(super) fn cache_scale_shape(&self, stored: &Stored) -> Result<Vec<usize>> {
        self.check_dtype(stored, &FLOATS)?;
        match self.shape(stored) {
            [] => Ok(vec![1]),
            [heads, rest @ ..] if *heads > 0 && rest.iter().all(|size| *size == 1) => {
                Ok(vec![*heads])
            }
            _ => {
                let file = self.file(stored);
                Err(file.wrong_shape(&stored.name, "[1] or [heads, 1, 1]"))
            }
        }
    }

    /// Checks that two names of the same cache scale hold the same numbers. Some writers use two, because engines know one or the other.
    pub(super) fn check_same_scale(&self, first: &Stored, second: &Stored) -> Result<()> {
        let (one, other) = (self.numbers(first)?, self.numbers(second)?);
        if one.len() != other.len() {
            return Err(self.ambiguous(&second.name, first, second));
        }
        let differ = |(one, other): (&f32, &f32)| one != other;
        let Some(index) = one.iter().zip(&other).position(differ) else {
            return Ok(());
        };
        let (value, first) = (one[index], &first.name);
        let expected = format!("{value}, as `{first}` says, which is the same scale");
        let file = self.file(second);
        Err(file.wrong_value(&second.name, index, other[index], expected))
    }
}
