//! Gradients: data of several dtypes, and their norm.

use std::collections::HashSet;

use candle_core::Tensor;
use fp8_core::Format;
use fp8_scaled::{Scaled, ScaledVar};

use super::super::error::{OptimError, Result};
use super::super::host::{PIECE, Slice};
use super::super::memory::address;
use super::rule::Extent;

/// Elements of a partial sum: fixed, so that the order of additions does not depend on the number of threads.
const BLOCK: usize = 1 << 14;

/// A gradient that fits its variable, in memory of its own.
pub struct Grad {
    /// Float data, or the codes of `format`, contiguous.
    data: Tensor,
    format: Option<Format>,
    pub(super) extent: Extent,
    /// The sum of the squares of the data.
    squares: f64,
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
            extent: Extent {
                dequant_scale: grad.scale(),
                amax: 0.0,
            },
            squares: 0.0,
        };
        if !grad.extent.dequant_scale.is_zero() {
            (grad.squares, grad.extent.amax) = grad.with(measure)?;
        }
        Ok(grad)
    }

    /// Calls `f` with the elements.
    pub(super) fn with<Out>(&self, f: impl FnOnce(Slice<'_>) -> Out) -> candle_core::Result<Out> {
        Slice::with(&self.data, self.format, f)
    }

    /// The sum of the squares of the values; not finite exactly when an element is not.
    pub(super) fn squares(&self) -> f64 {
        // With the scale zero all values are zero, whatever the data are.
        let unit = self.extent.unit();
        match unit == 0.0 {
            true => 0.0,
            false => self.squares * unit * unit,
        }
    }
}

/// The sum of squares in f64 and the largest magnitude, in which NaN counts as more than an infinity.
fn measure(grad: Slice<'_>) -> (f64, f64) {
    let len = grad.len();
    let block = |start: usize| {
        let (mut sum, mut amax, mut wide) = (0f64, 0u32, [0f32; PIECE]);
        let end = (start + BLOCK).min(len);
        for start in (start..end).step_by(PIECE) {
            let wide = grad.widened(start, &mut wide[..PIECE.min(end - start)]);
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
