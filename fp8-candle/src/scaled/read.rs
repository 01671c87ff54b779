//! What a scaled tensor is: shape, dtype, data, value.

use super::dtype::ScaledDType;
use super::value::{Data, Scaled};
use crate::base::error::{Error, Result};
use crate::cast::tensor::Fp8Tensor;
use candle_core::{DType, Device, Tensor};
use fp8_core::scaled::Scale;

impl Scaled {
    /// The data in floating point: the tensor itself, or FP8 codes decoded to f16, which has all their values.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[1f32, -4.0], &Device::Cpu)?, 2.0)?;
    /// assert_eq!(x.data()?.to_vec1::<f32>()?, [0.5, -2.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn data(&self) -> Result<Tensor> {
        self.float(self.compute_dtype())
    }

    /// The codes, if the data are FP8.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[1f32, -4.0], &Device::Cpu)?, 2.0)?;
    /// assert!(x.codes().is_none());
    /// assert!(x.astype(fp8_core::Format::E4M3)?.codes().is_some());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn codes(&self) -> Option<&Fp8Tensor> {
        match &self.data {
            Data::Float(_) => None,
            Data::Fp8(data) => Some(data),
        }
    }

    /// Data and scale.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[1f32, -4.0], &Device::Cpu)?, 2.0)?;
    /// let (data, scale) = x.data_and_scale()?;
    /// assert_eq!((data.to_vec1()?, scale.to_f32()), (vec![0.5f32, -2.0], 2.0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn data_and_scale(&self) -> Result<(Tensor, Scale)> {
        Ok((self.data()?, self.scale()))
    }

    /// The dtype of the data.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[1f32, -4.0], &Device::Cpu)?, 2.0)?;
    /// assert_eq!(x.dtype(), ScaledDType::Float(candle_core::DType::F32));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn dtype(&self) -> ScaledDType {
        match &self.data {
            Data::Float(data) => ScaledDType::Float(data.dtype()),
            Data::Fp8(data) => ScaledDType::Fp8(data.format()),
        }
    }

    /// The sizes of the dimensions.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[[1f32, -4.0], [3.0, 2.0]], &Device::Cpu)?, 2.0)?;
    /// assert_eq!(x.dims(), [2, 2]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn dims(&self) -> &[usize] {
        match &self.data {
            Data::Float(data) => data.dims(),
            Data::Fp8(data) => data.dims(),
        }
    }

    /// Number of dimensions.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[[1f32, -4.0], [3.0, 2.0]], &Device::Cpu)?, 2.0)?;
    /// assert_eq!(x.rank(), 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn rank(&self) -> usize {
        self.dims().len()
    }

    /// Number of elements.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[[1f32, -4.0], [3.0, 2.0]], &Device::Cpu)?, 2.0)?;
    /// assert_eq!(x.elem_count(), 4);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn elem_count(&self) -> usize {
        self.dims().iter().product()
    }

    /// Where the data are.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[1f32, -4.0], &Device::Cpu)?, 2.0)?;
    /// assert!(x.device().is_cpu());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn device(&self) -> &Device {
        match &self.data {
            Data::Float(data) => data.device(),
            Data::Fp8(data) => data.device(),
        }
    }

    /// The value, `data * scale`, rounded once to `dtype` (f32, bf16, f16 or f64).
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[1f32, -4.0], &Device::Cpu)?, 2.0)?;
    /// assert_eq!(x.to_tensor(candle_core::DType::F64)?.to_vec1::<f64>()?, [1.0, -4.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn to_tensor(&self, dtype: DType) -> Result<Tensor> {
        // Values may be out of the range of f32, in which the data are.
        let wide = match dtype {
            DType::F64 => DType::F64,
            _ => crate::ops::wide_dtype(self.compute_dtype()),
        };
        let wide = self.float(wide)?;
        let value = match self.scale() {
            Scale::ONE => wide,
            // Whatever the data are.
            Scale::ZERO => wide.zeros_like()?,
            scale => (wide * f64::from(scale.to_f32()))?,
        };
        Ok(value.to_dtype(dtype)?)
    }

    /// The values of a tensor of one dimension.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[1f32, -4.0], &Device::Cpu)?, 2.0)?;
    /// assert_eq!(x.to_vec1()?, [1.0, -4.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn to_vec1(&self) -> Result<Vec<f32>> {
        Ok(self.to_tensor(DType::F32)?.to_vec1()?)
    }

    /// The value of a tensor of one element, of any rank.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[[1f32, -4.0], [3.0, 2.0]], &Device::Cpu)?, 2.0)?;
    /// assert_eq!(x.max_all()?.to_scalar()?, 3.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
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
