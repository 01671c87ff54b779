//! The numbers of one scale tensor.

use super::fault::Fault;
use super::report::Finding;
use crate::check::is_scale;
use crate::load::survey::{Tensor, numbers};
use safetensors::Dtype;

/// Elements of the largest scale that is read as a whole; of a larger one these are read.
const MOST: usize = 1 << 25;

/// The numbers of a scale, and what they have in common.
pub(super) struct Numbers {
    pub(super) values: Vec<f32>,
    /// The median of those that are positive and finite; None if none is.
    pub(super) median: Option<f32>,
    /// Whether they encode powers of two in bytes.
    pub(super) are_bytes: bool,
    pub(super) bytes_read: u64,
}

impl Numbers {
    /// The numbers of `tensor`; None if it cannot be read, which another finding tells.
    pub(super) fn read(tensor: Tensor<'_>) -> Option<Self> {
        let dtype = tensor.dtype()?;
        let bytes = tensor.bytes(0..MOST * dtype.bitsize() / 8).ok()?;
        let values = numbers(dtype, &bytes)?;
        let mut usable: Vec<f32> = values
            .iter()
            .copied()
            .filter(|v| *v > 0. && v.is_finite())
            .collect();
        let middle = usable.len() / 2;
        let median =
            (!usable.is_empty()).then(|| *usable.select_nth_unstable_by(middle, f32::total_cmp).1);
        Some(Self {
            values,
            median,
            are_bytes: matches!(dtype, Dtype::U8 | Dtype::F8_E8M0),
            bytes_read: bytes.len() as u64,
        })
    }

    /// Whether all of them are exactly 1.
    pub(super) fn all_one(&self) -> bool {
        !self.values.is_empty() && self.values.iter().all(|value| *value == 1.)
    }

    /// Whether all of them could be exponent bytes that became numbers.
    pub(super) fn all_bytes(&self) -> bool {
        let is_byte = |value: &f32| value.fract() == 0. && (1. ..=254.).contains(value);
        !self.are_bytes && !self.values.is_empty() && self.values.iter().all(is_byte)
    }

    /// The index of the first number that is no power of two.
    pub(super) fn first_not_power_of_two(&self) -> Option<usize> {
        const MANTISSA: u32 = (1 << 23) - 1;
        let is_power = |value: f32| value.to_bits() & MANTISSA == 0;
        self.values
            .iter()
            .position(|value| value.is_normal() && !is_power(*value))
    }
}

/// Adds the numbers that no scale can be. A scale of 0 is left to the codes.
pub(super) fn check(tensor: Tensor<'_>, numbers: &Numbers, faults: &mut Vec<Finding>) {
    let kinds: [(Fault, fn(f32) -> bool, &str); 3] = [
        (
            Fault::ScaleNotFinite,
            |value| !value.is_finite(),
            "finite numbers",
        ),
        (
            Fault::ScaleNegative,
            |value| value < 0. && value.is_finite(),
            "positive numbers",
        ),
        (
            Fault::ScaleTiny,
            |value| value > 0. && value.is_finite() && !is_scale(value),
            "numbers that are normal in f32, and their reciprocals too",
        ),
    ];
    for (fault, is_bad, expected) in kinds {
        // The smallest power of two in a byte is subnormal in f32, and valid.
        if fault == Fault::ScaleTiny && numbers.are_bytes {
            continue;
        }
        let Some(index) = numbers.values.iter().position(|value| is_bad(*value)) else {
            continue;
        };
        let count = numbers
            .values
            .iter()
            .filter(|value| is_bad(**value))
            .count();
        let mut found = format!("{:e} at index {index}", numbers.values[index]);
        if count > 1 {
            found += &format!(", {count} such of {}", numbers.values.len());
        }
        faults.push(Finding::new(fault, tensor.name, found, expected));
    }
}
