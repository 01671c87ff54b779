//! Tensors of a file, as candle holds them.

use super::SafetensorsFile;
use crate::error::{Error, Result};
use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use safetensors::Dtype;
use std::ops::Range;

/// Bytes to read at a time; a multiple of the size of every number.
const PIECE: usize = 1 << 18;

impl SafetensorsFile {
    /// Some rows of a tensor as stored.
    pub(crate) fn rows(&self, name: &str, rows: Range<usize>, device: &Device) -> Result<Tensor> {
        let (at, shape) = self.place_of_rows(name, rows.clone())?;
        if self.scattered(name).is_some() {
            let (bytes, dtype) = (self.bytes_of_rows(name, rows)?, self.candle_dtype(name)?);
            return Ok(Tensor::from_raw_buffer(&bytes, dtype, &shape, device)?);
        }
        self.read(name, &shape, at, device)
    }

    /// A tensor as stored. Its numbers are read into its own memory piece by piece, so there is never a second copy of them.
    ///
    /// # Errors
    /// As [`SafetensorsFile::bytes`]; [`Error::TensorDType`] for a dtype that candle does not have.
    pub fn tensor(&self, name: &str, device: &Device) -> Result<Tensor> {
        let info = self.info(name)?;
        if self.scattered(name).is_some() {
            let (bytes, dtype) = (self.bytes(name)?, self.candle_dtype(name)?);
            return Ok(Tensor::from_raw_buffer(&bytes, dtype, &info.shape, device)?);
        }
        self.read(name, &info.shape, info.data_offsets, device)
    }

    /// A tensor of this shape from the data of the tensor `name` at these offsets.
    fn read(
        &self,
        name: &str,
        shape: &[usize],
        at: (usize, usize),
        device: &Device,
    ) -> Result<Tensor> {
        let tensor = match self.info(name)?.dtype {
            Dtype::F32 => Tensor::from_vec(self.numbers(at, f32::from_le_bytes)?, shape, device),
            Dtype::BF16 => Tensor::from_vec(self.numbers(at, bf16::from_le_bytes)?, shape, device),
            Dtype::F16 => Tensor::from_vec(self.numbers(at, f16::from_le_bytes)?, shape, device),
            Dtype::F64 => Tensor::from_vec(self.numbers(at, f64::from_le_bytes)?, shape, device),
            Dtype::U8 => Tensor::from_vec(self.read_range(at.0, at.1)?, shape, device),
            Dtype::U32 => Tensor::from_vec(self.numbers(at, u32::from_le_bytes)?, shape, device),
            Dtype::I64 => Tensor::from_vec(self.numbers(at, i64::from_le_bytes)?, shape, device),
            _ => {
                let dtype = self.candle_dtype(name)?;
                Tensor::from_raw_buffer(&self.read_range(at.0, at.1)?, dtype, shape, device)
            }
        };
        Ok(tensor?)
    }

    fn candle_dtype(&self, name: &str) -> Result<DType> {
        let dtype = self.info(name)?.dtype;
        DType::try_from(dtype).map_err(|_| Error::TensorDType {
            tensor: name.to_string(),
            got: format!("{dtype:?}"),
            expected: "a dtype that candle has".into(),
        })
    }

    fn numbers<T, const SIZE: usize>(
        &self,
        (begin, end): (usize, usize),
        number: impl Fn([u8; SIZE]) -> T,
    ) -> Result<Vec<T>> {
        self.check_end(end)?;
        let mut numbers = Vec::with_capacity((end - begin) / SIZE);
        let mut piece = vec![0; PIECE.min(end - begin)];
        for at in (begin..end).step_by(PIECE) {
            let piece = &mut piece[..PIECE.min(end - at)];
            self.read_at(at, piece)?;
            let (elements, _) = piece.as_chunks::<SIZE>();
            numbers.extend(elements.iter().map(|bytes| number(*bytes)));
        }
        Ok(numbers)
    }
}
