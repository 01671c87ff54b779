//! Scales of weights and inputs as they are stored: read, checked, and cut to the layer.

use super::Checkpoint;
use super::catalogue::{Stored, Weight};
use super::family::{Order, ScaleLayout};
use super::layout::{take_rows, untile};
use crate::error::{Error, Result};
use crate::names::join;
use crate::scheme::grid;
use candle_core::{DType, Device, Tensor};
use fp8_core::{E8M0, Granularity};
use safetensors::Dtype;

/// What a scale has to be.
const SCALE: &str =
    "positive, finite and not subnormal, and its reciprocal too, as a scale has to be";

impl Checkpoint {
    /// f32 dequant_scales of a weight in the shape of their granularity.
    pub(super) fn scales(&self, weight: &Weight, device: &Device) -> Result<Tensor> {
        let Some(stored) = &weight.scale else {
            return Ok(Tensor::ones(1, DType::F32, device)?);
        };
        let (n, k) = (weight.shape[0], weight.shape[1]);
        let (rows, cols) = grid(weight.granularity, n, k);
        let mut values = self.numbers(stored)?;
        values = match weight.layout {
            ScaleLayout::Tiles => untile(&values, rows, cols),
            ScaleLayout::RowMajor => {
                let dims = self.files[stored.file]
                    .shape(&stored.name)
                    .unwrap_or_default();
                match *dims {
                    [r, c] if (r, c) != (rows, cols) && r * c > rows * cols => {
                        self.cropped(stored, &values, c, (rows, cols))?
                    }
                    _ => values,
                }
            }
        };
        // Taller blocks hold whole heads, and within a head all rows share a scale then.
        let is_per_row = matches!(
            weight.granularity,
            Granularity::Rowwise | Granularity::Mx | Granularity::Blockwise { rows: 1, .. }
        );
        if let (Order::Rotary { heads }, true) = (weight.codes.order, is_per_row) {
            values = take_rows(&values, n, heads, stored)?;
        }
        match weight.granularity {
            Granularity::Mx => self.check_powers(stored, &values)?,
            _ => {
                self.check_weight_scales(weight, stored, &values, (rows, cols))?;
                // What is left has codes of 0 alone. Any scale gives their value, and this one can be divided by.
                let zeros = values.iter_mut().filter(|scale| **scale == 0.);
                zeros.for_each(|scale| *scale = 1.);
            }
        }
        let shape: &[usize] = match weight.granularity {
            Granularity::Tensorwise => &[1],
            _ => &[rows, cols],
        };
        Ok(Tensor::from_vec(values, shape, device)?)
    }

    /// Numbers of a scale tensor: bytes mean powers of two.
    pub(super) fn numbers(&self, stored: &Stored) -> Result<Vec<f32>> {
        let file = &self.files[stored.file];
        Ok(match file.dtype(&stored.name) {
            Some(Dtype::U8 | Dtype::F8_E8M0) => {
                let bytes = file.bytes(&stored.name)?;
                bytes
                    .iter()
                    .map(|byte| E8M0::from_bits(*byte).to_f32())
                    .collect()
            }
            _ => {
                let scales = file.tensor(&stored.name, &Device::Cpu)?;
                scales.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?
            }
        })
    }

    /// A scale of 0 is right where all codes are 0.
    pub(super) fn check_weight_scales(
        &self,
        weight: &Weight,
        stored: &Stored,
        scales: &[f32],
        (rows, cols): (usize, usize),
    ) -> Result<()> {
        if !scales.contains(&0.) {
            return self.check_scales(stored, scales);
        }
        let (n, k) = (weight.shape[0], weight.shape[1]);
        let codes = self.codes(weight)?;
        let (high, wide) = match weight.granularity {
            Granularity::Blockwise { rows, cols } => (rows, cols),
            _ => (n.div_ceil(rows.max(1)), k),
        };
        let mut used = vec![false; scales.len()];
        for (at, code) in codes.iter().enumerate() {
            if code & 0x7F != 0 {
                used[at / k / high * cols + at % k / wide] = true;
            }
        }
        let checked = scales.iter().zip(used);
        let checked = checked.map(|(scale, used)| if used || *scale != 0. { *scale } else { 1. });
        self.check_scales(stored, &checked.collect::<Vec<_>>())
    }

    pub(super) fn path(&self, stored: &Stored) -> std::path::Display<'_> {
        self.files[stored.file].path().display()
    }

    pub(super) fn check_scales(&self, stored: &Stored, scales: &[f32]) -> Result<()> {
        let fits = |value: f32| value > 0. && value.is_normal() && value.recip().is_normal();
        self.check_numbers(stored, scales, SCALE, fits)
    }

    pub(super) fn check_powers(&self, stored: &Stored, scales: &[f32]) -> Result<()> {
        let fits = |value: f32| value > 0. && value.is_finite();
        let expected = "a power of two, not the NaN of E8M0";
        self.check_numbers(stored, scales, expected, fits)
    }

    pub(super) fn check_numbers(
        &self,
        stored: &Stored,
        numbers: &[f32],
        expected: &str,
        fits: impl Fn(f32) -> bool,
    ) -> Result<()> {
        match numbers.iter().position(|number| !fits(*number)) {
            None => Ok(()),
            Some(index) => Err(Error::TensorValue {
                tensor: stored.name.clone(),
                index,
                value: f64::from(numbers[index]),
                expected: format!("{expected}, in {}", self.path(stored)),
            }),
        }
    }

    /// The first rows and columns of a grid that was padded. What is left out must be one number: anything else means blocks
    /// of another size.
    pub(super) fn cropped(
        &self,
        stored: &Stored,
        values: &[f32],
        width: usize,
        (rows, cols): (usize, usize),
    ) -> Result<Vec<f32>> {
        let (mut kept, mut padding) = (vec![], None);
        for (index, value) in values.iter().enumerate() {
            if index / width < rows && index % width < cols {
                kept.push(*value);
                continue;
            }
            if value.to_bits() != *padding.get_or_insert(value.to_bits()) {
                let file = self.path(stored);
                return Err(Error::TensorValue {
                    tensor: stored.name.clone(),
                    index,
                    value: f64::from(*value),
                    expected: format!(
                        "padding of one value beyond the blocks of the weight, in {file}"
                    ),
                });
            }
        }
        Ok(kept)
    }

    /// The static scale of a layer's inputs, f32 `[1]`.
    pub(super) fn input_scale(
        &self,
        path: &str,
        weight: &Weight,
        device: &Device,
    ) -> Result<Tensor> {
        let Some(stored) = &weight.input else {
            return Err(self.missing(&join(path, "input_scale")));
        };
        let scale = self.numbers(stored)?;
        self.check_scales(stored, &scale)?;
        Ok(Tensor::from_vec(scale, 1, device)?)
    }
}
