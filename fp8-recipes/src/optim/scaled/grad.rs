//! Gradients: data of several dtypes, and their norm.

use super::super::OptimError;
use super::super::error::Result;
use super::super::named::address;
use super::size::value;
use candle_core::{CpuStorage, Storage, Tensor};
use fp8_core::Format;
use fp8_scaled::{Scaled, ScaledVar};
use half::{bf16, f16};
use std::collections::HashSet;

/// Elements of a partial sum: fixed, so that the order of additions does not depend on the number of threads.
const BLOCK: usize = 1 << 14;
/// Elements widened at a time.
pub(super) const PIECE: usize = 512;

/// A gradient that fits its variable, in memory of its own.
pub(super) struct Grad {
    /// Float data, or the codes of `format`, contiguous.
    data: Tensor,
    format: Option<Format>,
    /// Of the data.
    pub(super) scale: f64,
    /// Largest magnitude of the data.
    pub(super) amax: f64,
    /// Of the data.
    squares: f64,
}

/// Its elements.
#[derive(Clone, Copy)]
pub(super) enum Slice<'a> {
    F16(&'a [f16]),
    BF16(&'a [bf16]),
    F32(&'a [f32]),
    Codes(&'a [u8], Format),
}

impl Slice<'_> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::F16(values) => values.len(),
            Self::BF16(values) => values.len(),
            Self::F32(values) => values.len(),
            Self::Codes(codes, _) => codes.len(),
        }
    }

    /// The elements from `start` on.
    pub(super) fn widen(&self, start: usize, wide: &mut [f32]) {
        let range = start..start + wide.len();
        match self {
            Self::F16(values) => fp8_core::widen(&values[range], wide),
            Self::BF16(values) => fp8_core::widen(&values[range], wide),
            Self::F32(values) => wide.copy_from_slice(&values[range]),
            Self::Codes(codes, format) => {
                fp8_core::decode(*format, &codes[range], 1.0, wide);
            }
        }
    }
}

impl Grad {
    /// The gradient of `var`; `own` is the memory of all variables.
    pub(super) fn new(var: &ScaledVar, grad: &Scaled, own: &HashSet<usize>) -> Result<Self> {
        let (name, device) = (var.name().to_string(), var.device());
        if !grad.device().same_device(device) {
            return Err(OptimError::GradientDevice {
                name,
                expected: device.location(),
                got: grad.device().location(),
            });
        }
        let (data, format) = match grad.codes() {
            Some(codes) => (codes.codes().clone(), Some(codes.format())),
            None => (grad.data()?, None),
        };
        let wide = data.dtype() == candle_core::DType::F64;
        if grad.dims() != var.dims() || wide {
            return Err(OptimError::Gradient {
                name,
                expected_dtype: var.dtype(),
                expected_shape: var.dims().into(),
                got_dtype: data.dtype(),
                got_shape: grad.dims().into(),
            });
        }
        // Updates in place must not change a gradient that is still to be read.
        let data = match own.contains(&address(&data)) {
            true => data.detach().copy()?,
            false => data.contiguous()?,
        };
        let mut grad = Self {
            data,
            format,
            scale: value(grad.scale()),
            amax: 0.0,
            squares: 0.0,
        };
        if grad.scale != 0.0 {
            (grad.squares, grad.amax) = grad.with(measure)?;
        }
        Ok(grad)
    }

    /// Calls `f` with the elements.
    pub(super) fn with<Out>(&self, f: impl FnOnce(Slice<'_>) -> Out) -> candle_core::Result<Out> {
        let (storage, layout) = self.data.storage_and_layout();
        let (Storage::Cpu(cpu), Some((start, end))) = (&*storage, layout.contiguous_offsets())
        else {
            candle_core::bail!("a gradient is not contiguous on the CPU")
        };
        let slice = match (cpu, self.format) {
            (CpuStorage::F16(values), None) => Slice::F16(&values[start..end]),
            (CpuStorage::BF16(values), None) => Slice::BF16(&values[start..end]),
            (CpuStorage::F32(values), None) => Slice::F32(&values[start..end]),
            (CpuStorage::U8(codes), Some(format)) => Slice::Codes(&codes[start..end], format),
            _ => candle_core::bail!("a gradient cannot be {:?}", self.data.dtype()),
        };
        Ok(f(slice))
    }

    /// The sum of the squares of the values; not finite exactly where an element is not.
    pub(super) fn squares(&self) -> f64 {
        // A zero scale is that of zeros, whatever the data are.
        match self.scale == 0.0 {
            true => 0.0,
            false => self.squares * self.scale * self.scale,
        }
    }
}

/// Sum of squares in f64 and the largest magnitude, NaN taken for an infinity.
fn measure(grad: Slice<'_>) -> (f64, f64) {
    let len = grad.len();
    let block = |start: usize| {
        let (mut sum, mut amax, mut wide) = (0f64, 0u32, [0f32; PIECE]);
        let end = (start + BLOCK).min(len);
        for start in (start..end).step_by(PIECE) {
            let wide = &mut wide[..PIECE.min(end - start)];
            grad.widen(start, wide);
            // In lanes, which vectorize.
            let mut lanes = [0f64; 8];
            for chunk in wide.chunks(8) {
                for (lane, x) in lanes.iter_mut().zip(chunk) {
                    *lane += f64::from(*x) * f64::from(*x);
                    amax = amax.max(x.to_bits() & 0x7FFF_FFFF);
                }
            }
            sum += lanes.iter().sum::<f64>();
        }
        (sum, amax)
    };
    let starts: Vec<usize> = (0..len).step_by(BLOCK).collect();
    let parts: Vec<(f64, u32)> = match starts.as_slice() {
        [only] => vec![block(*only)],
        starts => fp8_candle::parallel::map(starts.iter().copied(), block),
    };
    let sum = parts.iter().map(|(sum, _)| sum).sum();
    let amax = parts.iter().fold(0, |max, (_, amax)| max.max(*amax));
    (sum, f64::from(f32::from_bits(amax)))
}
