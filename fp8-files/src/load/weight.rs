//! The codes and scales of an FP8 weight, and the scale of its inputs: read, checked and cut to the layer.

use super::catalogue::Weight;
use super::family::{Global, Order, ScaleLayout};
use super::files::{Files, Stored};
use super::layout::{take_rows, untile};
use crate::check::{SCALE, is_scale};
use crate::error::Result;
use crate::scheme::grid;
use candle_core::{DType, Device, Tensor};
use fp8_candle::Fp8Tensor;
use fp8_core::{Contraction, Format, Granularity, ScaleGrid, unpack_e2m1};
use std::ops::Range;

impl Files {
    /// A weight on `device`.
    pub(super) fn fp8_tensor(&self, weight: &Weight, device: &Device) -> Result<Fp8Tensor> {
        let codes = Tensor::from_vec(self.codes(weight)?, &weight.shape, device)?;
        let scales = self.scales(weight, device)?;
        let (format, granularity) = (Format::E4M3, weight.scheme.weight);
        let contraction = Contraction::Cols;
        let tensor = Fp8Tensor::from_parts(codes, format, granularity, contraction, scales)?;
        Ok(tensor)
    }

    /// Row-major codes, checked to hold no NaN.
    pub(super) fn codes(&self, weight: &Weight) -> Result<Vec<u8>> {
        let Stored { name, order, .. } = &weight.codes;
        let file = self.file(&weight.codes);
        // The first code of a word is its lowest byte, and words are little-endian, so their bytes are the codes.
        let mut codes = file.bytes(name)?;
        if weight.fp4 {
            codes = unpack_e2m1(&codes);
        }
        if let Order::Rotary { heads } = *order {
            codes = take_rows(&codes, weight.shape[0], heads, name)?;
        }
        self.check_codes(weight, &codes, 0)?;
        Ok(codes)
    }

    /// The codes of some rows, for a weight whose rows are in the model's order.
    pub(super) fn codes_of_rows(&self, weight: &Weight, rows: Range<usize>) -> Result<Vec<u8>> {
        let (Stored { name, .. }, [_, k]) = (&weight.codes, weight.shape);
        let first = rows.start * k;
        let mut codes = self.file(&weight.codes).bytes_of_rows(name, rows)?;
        if weight.fp4 {
            codes = unpack_e2m1(&codes);
        }
        self.check_codes(weight, &codes, first)?;
        Ok(codes)
    }

    /// Checks that codes, of which the first has the index `first`, hold no NaN.
    fn check_codes(&self, weight: &Weight, codes: &[u8], first: usize) -> Result<()> {
        let expected = "a finite value, as every weight";
        let (file, name) = (self.file(&weight.codes), &weight.codes.name);
        match codes.iter().position(|code| code & 0x7F == 0x7F) {
            None => Ok(()),
            Some(index) => Err(file.wrong_value(name, first + index, f64::NAN, expected)),
        }
    }

    /// f32 dequant_scales of a weight in the shape of their granularity.
    pub(super) fn scales(&self, weight: &Weight, device: &Device) -> Result<Tensor> {
        let Some(stored) = &weight.scale else {
            return Ok(Tensor::ones(1, DType::F32, device)?);
        };
        let ([n, k], granularity) = (weight.shape, weight.scheme.weight);
        let grid = grid(granularity, n, k);
        let (rows, cols) = (grid.scale_rows(), grid.scale_cols());
        let mut values = self.numbers(stored)?;
        if let Some((stored, global)) = &weight.global {
            let number = self.numbers(stored)?;
            self.check_scales(stored, &number)?;
            for value in &mut values {
                match global {
                    Global::Multiplies => *value *= number[0],
                    Global::Divides => *value /= number[0],
                }
            }
        }
        match (weight.layout, self.shape(stored)) {
            (ScaleLayout::Tiles, _) => values = untile(&values, rows, cols),
            (ScaleLayout::RowMajor, &[r, c]) if (r, c) != (rows, cols) && r * c > rows * cols => {
                values = self.cropped(stored, &values, c, (rows, cols))?;
            }
            _ => {}
        }
        // Taller blocks hold whole heads, so all rows of a head share a scale.
        let is_per_row = matches!(
            granularity,
            Granularity::Rowwise | Granularity::Mx | Granularity::Blockwise { rows: 1, .. }
        );
        if let (Order::Rotary { heads }, true) = (weight.codes.order, is_per_row) {
            values = take_rows(&values, n, heads, &stored.name)?;
        }
        if granularity == Granularity::Mx {
            let fits = |value: f32| value > 0. && value.is_finite();
            let expected = "a power of two, not the NaN of E8M0";
            self.check_numbers(stored, &values, expected, fits)?;
        } else {
            // Where all codes are 0 a scale of 0 is valid. Any other scale gives the same values, and one can divide by it.
            if values.contains(&0.) {
                let used = self.used_scales(weight, &grid)?;
                let unused = values.iter_mut().zip(used).filter(|(_, used)| !used);
                let zeros = unused.filter(|(scale, _)| **scale == 0.);
                zeros.for_each(|(scale, _)| *scale = 1.);
            }
            self.check_scales(stored, &values)?;
        }
        let shape: &[usize] = match granularity {
            Granularity::Tensorwise => &[1],
            _ => &[rows, cols],
        };
        Ok(Tensor::from_vec(values, shape, device)?)
    }

    /// For each scale whether it has a code other than 0.
    fn used_scales(&self, weight: &Weight, grid: &ScaleGrid) -> Result<Vec<bool>> {
        let mut used = vec![false; grid.len()];
        let k = weight.shape[1];
        for (at, code) in self.codes(weight)?.into_iter().enumerate() {
            if code & 0x7F != 0 {
                used[grid.index(at / k, at % k)] = true;
            }
        }
        Ok(used)
    }

    pub(super) fn check_scales(&self, stored: &Stored, scales: &[f32]) -> Result<()> {
        self.check_numbers(stored, scales, SCALE, is_scale)
    }

    /// The first rows and columns of a padded grid. All of the padding must be one number: anything else means blocks of another size.
    fn cropped(
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
            } else if value.to_bits() != *padding.get_or_insert(value.to_bits()) {
                let expected = "padding of one value beyond the blocks of the weight";
                let file = self.file(stored);
                return Err(file.wrong_value(&stored.name, index, *value, expected));
            }
        }
        Ok(kept)
    }

    /// The static scale of a layer's inputs, f32 `[1]`.
    pub(super) fn input_scale(&self, stored: &Stored, device: &Device) -> Result<Tensor> {
        let scale = self.numbers(stored)?;
        self.check_scales(stored, &scale)?;
        Ok(Tensor::from_vec(scale, 1, device)?)
    }
}
