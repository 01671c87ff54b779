//! Reading a scaled tensor: shape, dtype, data, value.

use super::dtype::ScaledDType;
use super::error::{Error, Result};
use super::value::{Data, Scaled};
use candle_core::{DType, Device, Tensor};
use fp8_candle::Fp8Tensor;
use fp8_candle::ops::elements::wide_dtype;
use fp8_core::scaled::Scale;

impl Scaled {
    /// The data in floating point: the tensor itself, or FP8 codes decoded to f16, which represents all their values. The data of a
    /// parameter's value change when the parameter does.
    ///
    /// # Errors
    /// [`Error::ChangedParameter`] if they have; if a device fails.
    pub fn data(&self) -> Result<Tensor> {
        self.float(self.compute_dtype())
    }

    /// The codes, if the data are FP8.
    pub fn codes(&self) -> Option<&Fp8Tensor> {
        match &self.data {
            Data::Float(_) => None,
            Data::Fp8(data) => Some(data),
        }
    }

    /// Data and scale.
    pub fn data_and_scale(&self) -> Result<(Tensor, Scale)> {
        Ok((self.data()?, self.scale()))
    }

    /// The dtype of the data.
    pub fn dtype(&self) -> ScaledDType {
        match &self.data {
            Data::Float(data) => ScaledDType::Float(data.dtype()),
            Data::Fp8(data) => ScaledDType::Fp8(data.format()),
        }
    }

    /// The sizes of the dimensions.
    pub fn dims(&self) -> &[usize] {
        match &self.data {
            Data::Float(data) => data.dims(),
            Data::Fp8(data) => data.dims(),
        }
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.dims().len()
    }

    /// Number of elements.
    pub fn elem_count(&self) -> usize {
        self.dims().iter().product()
    }

    /// Where the data are.
    pub fn device(&self) -> &Device {
        match &self.data {
            Data::Float(data) => data.device(),
            Data::Fp8(data) => data.device(),
        }
    }

    /// The value, `data * scale`, rounded once to `dtype` (f32, bf16, f16 or f64). It stays as it is when a parameter changes whose value
    /// this is.
    ///
    /// # Errors
    /// As [`Scaled::data`], and if `dtype` is another.
    pub fn to_tensor(&self, dtype: DType) -> Result<Tensor> {
        // Values may be out of the range of f32 although the data are not.
        let wide = match dtype {
            DType::F64 => DType::F64,
            _ => wide_dtype(self.compute_dtype()),
        };
        let wide = self.float(wide)?;
        let value = match self.scale() {
            Scale::ONE => wide,
            // Zeros, whatever the data are.
            Scale::ZERO => wide.zeros_like()?,
            scale => (wide * f64::from(scale.to_f32()))?,
        };
        let value = value.to_dtype(dtype)?;
        match self.origin.is_some() && self.shares(&value) {
            true => Ok(value.copy()?),
            false => Ok(value),
        }
    }

    /// The values of a tensor of one dimension.
    pub fn to_vec1(&self) -> Result<Vec<f32>> {
        Ok(self.to_tensor(DType::F32)?.to_vec1()?)
    }

    /// The value of a tensor of one element, of any rank.
    pub fn to_scalar(&self) -> Result<f32> {
        let value = self.to_tensor(DType::F32)?;
        match value.elem_count() {
            1 => Ok(value.reshape(())?.to_scalar()?),
            _ => Err(Error::NotScalar {
                op: "to_scalar",
                got: self.dims().to_vec(),
            }),
        }
    }
}
