//! A moment as tensors of codes, amaxes and curves.

use candle_core::{DType, Device, Result, Shape, Tensor};

use fp8_core::decode_expanded;

use super::coding::{BLOCK, Coding, encode};

/// A moment in FP8, on the device of its variable.
#[derive(Clone)]
pub struct Coded {
    /// U8, in the shape of the variable.
    pub(crate) codes: Tensor,
    /// f32, one for each block.
    pub(crate) amaxes: Tensor,
    /// U8, one for each block.
    pub(crate) curves: Tensor,
}

impl Coded {
    pub(crate) fn zeros(shape: &Shape, device: &Device) -> Result<Self> {
        let blocks = shape.elem_count().div_ceil(BLOCK);
        Ok(Self {
            codes: Tensor::zeros(shape, DType::U8, device)?,
            amaxes: Tensor::zeros(blocks, DType::F32, device)?,
            curves: Tensor::zeros(blocks, DType::U8, device)?,
        })
    }

    /// The codes of values, which the host computes.
    pub(crate) fn of(values: &Tensor, coding: Coding) -> Result<Self> {
        let (shape, device) = (values.shape(), values.device());
        let values = values.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        let values = values.flatten_all()?.to_vec1::<f32>()?;
        let blocks = values.len().div_ceil(BLOCK);
        let (mut codes, mut amaxes) = (vec![0; values.len()], vec![0.; blocks]);
        let mut curves = vec![0; blocks];
        encode(&values, coding, (&mut codes, &mut amaxes, &mut curves));
        Ok(Self {
            codes: Tensor::from_vec(codes, shape, device)?,
            amaxes: Tensor::from_vec(amaxes, blocks, device)?,
            curves: Tensor::from_vec(curves, blocks, device)?,
        })
    }

    /// The values, in f32 on `device`, computed by the host.
    pub(crate) fn values(&self, device: &Device) -> Result<Tensor> {
        let codes = self.codes.flatten_all()?.to_vec1::<u8>()?;
        let (amaxes, curves) = (self.amaxes.to_vec1::<f32>()?, self.curves.to_vec1::<u8>()?);
        let mut values = vec![0.; codes.len()];
        decode_expanded(&codes, &amaxes, &curves, &mut values);
        Tensor::from_vec(values, self.codes.shape(), device)
    }

    /// What its tensors are called after the name of the moment.
    pub(crate) fn tensors(&self) -> [(&'static str, &Tensor); 3] {
        [
            ("", &self.codes),
            (AMAXES, &self.amaxes),
            (CURVES, &self.curves),
        ]
    }

    pub(crate) fn bytes(&self) -> u64 {
        (self.codes.elem_count() + 5 * self.amaxes.elem_count()) as u64
    }
}

pub(super) const AMAXES: &str = ".amax";
pub(super) const CURVES: &str = ".curve";
