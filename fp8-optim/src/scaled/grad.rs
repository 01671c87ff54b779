//! Gradients: data of several dtypes, and their norm.

use std::collections::HashSet;

use candle_core::{DType, Tensor};
use fp8_core::Format;
use fp8_scaled::{Scaled, ScaledVar};

use super::super::error::Result;
use super::super::gradients::own_gradient;
use super::super::host::{PIECE, Slice};
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
        let (data, format) = match grad.codes() {
            Some(codes) => (codes.codes().clone(), Some(codes.format())),
            None => (grad.data()?, None),
        };
        let (parameter, fits) = (var.data_var(), data.dtype() != DType::F64);
        let data = own_gradient(var.name(), parameter, &data, grad.dims(), fits, own)?;
        let mut grad = Self {
            data: data.contiguous()?,
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
pub(super) fn measure(values: Slice<'_>) -> (f64, f64) {
    let len = values.len();
    let block = |start: usize| {
        let (mut sum, mut amax, mut wide) = (0f64, 0u32, [0f32; PIECE]);
        let end = (start + BLOCK).min(len);
        for start in (start..end).step_by(PIECE) {
            let wide = values.widened(start, &mut wide[..PIECE.min(end - start)]);
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
    let parts = fp8_candle::parallel::map((0..len).step_by(BLOCK), block);
    let sum = parts.iter().map(|(sum, _)| sum).sum();
    let amax = parts.iter().fold(0, |max, (_, amax)| max.max(*amax));
    (sum, f64::from(f32::from_bits(amax)))
}
