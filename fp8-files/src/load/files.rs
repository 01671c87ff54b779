//! The open files of a checkpoint, with the family of each, and the tensors stored in them.

use super::family::{Family, Order};
use super::layout::rotary_rows;
use crate::error::{Error, Result};
use crate::safetensors_file::SafetensorsFile;
use candle_core::{DType, Device, Tensor};
use fp8_core::{E8M0, Format};
use safetensors::Dtype;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

/// Dtypes of scales that are numbers.
pub(super) const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::BF16, Dtype::F16];

/// A tensor in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) file: usize,
    pub(super) name: String,
    pub(super) order: Order,
}

/// The files, the family of each, and the file of each stored name.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) files: Vec<SafetensorsFile>,
    pub(super) families: Vec<Arc<Family>>,
    pub(super) index: HashMap<String, usize>,
}

impl Files {
    pub(super) fn family(&self, stored: &Stored) -> &Family {
        &self.families[stored.file]
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

    pub(super) fn check_dtype(&self, stored: &Stored, allowed: &[Dtype]) -> Result<()> {
        let dtype = self.dtype(stored);
        if dtype.is_some_and(|dtype| allowed.contains(&dtype)) {
            return Ok(());
        }
        let mut names: Vec<String> = allowed.iter().map(|dtype| format!("{dtype:?}")).collect();
        let last = names.pop().unwrap_or_default();
        let expected = match names.is_empty() {
            true => last,
            false => format!("{} or {last}", names.join(", ")),
        };
        Err(self.file(stored).wrong_dtype(&stored.name, expected))
    }

    /// The error for two tensors that both stand for `name`.
    pub(super) fn ambiguous(&self, name: &str, first: &Stored, second: &Stored) -> Error {
        Error::Ambiguous {
            path: self.path(second).to_path_buf(),
            tensor: name.to_string(),
            first: first.name.clone(),
            second: second.name.clone(),
        }
    }

    /// Checks numbers that were read from `stored`.
    pub(super) fn check_numbers(
        &self,
        stored: &Stored,
        numbers: &[f32],
        expected: &str,
        fits: impl Fn(f32) -> bool,
    ) -> Result<()> {
        let (file, name) = (self.file(stored), &stored.name);
        match numbers.iter().position(|number| !fits(*number)) {
            None => Ok(()),
            Some(index) => Err(file.wrong_value(name, index, numbers[index], expected)),
        }
    }

    /// The numbers of a scale tensor. Bytes encode powers of two, the codes of FP8 their values.
    pub(super) fn numbers(&self, stored: &Stored) -> Result<Vec<f32>> {
        let (file, name) = (self.file(stored), &stored.name);
        if let Some(Dtype::U8 | Dtype::F8_E8M0) = self.dtype(stored) {
            let bytes = file.bytes(name)?.into_iter();
            return Ok(bytes.map(|byte| E8M0::from_bits(byte).to_f32()).collect());
        }
        if let Some(Dtype::F8_E4M3) = self.dtype(stored) {
            let codes = file.bytes(name)?.into_iter();
            return Ok(codes.map(|code| Format::E4M3.decode(code)).collect());
        }
        let scales = file.tensor(name, &Device::Cpu)?.to_dtype(DType::F32)?;
        Ok(scales.flatten_all()?.to_vec1()?)
    }

    /// A tensor as stored, with its rows in the model's order.
    pub(super) fn tensor(&self, stored: &Stored, device: &Device) -> Result<Tensor> {
        let tensor = self.file(stored).tensor(&stored.name, device)?;
        let Order::Rotary { heads } = stored.order else {
            return Ok(tensor);
        };
        let rows = tensor.dims().first().copied().unwrap_or_default();
        // One number for all rows, or an empty tensor.
        if rows == 1 || tensor.rank() == 0 || tensor.elem_count() == 0 {
            return Ok(tensor);
        }
        let rows = rotary_rows(rows, heads, &stored.name)?.into_iter();
        let rows = Tensor::new(rows.map(|row| row as u32).collect::<Vec<_>>(), device)?;
        Ok(tensor.index_select(&rows, 0)?)
    }
}
