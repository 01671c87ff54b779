//! How one tensor of one GEMM is cast: format, granularity and where its scale comes from.

pub(crate) mod quantized;
mod rows;
mod shared;

pub use quantized::Quantized;

use crate::base::data::matrix_dims;
use crate::base::error::{Error, Result};
use crate::cast::recall::{Noted, Recall};
use crate::cast::scale_source::{FirstScale, ScaleSource};
use crate::cast::state::{Observer, Slot};
use crate::cast::stochastic::{Draw, Stochastic};
use crate::cast::tensor::Fp8Tensor;
use crate::device::{Codes, CurrentCast, CurrentScale, ScalePolicy, backend};
use candle_core::{DType, Tensor};
use fp8_core::{Cast, Contraction, Granularity, Rounding, ScaleGrid};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts the tensors that were cast; a cached weight is not cast again.
pub type CastCounter = Arc<AtomicU64>;

/// Sees every cast of a [`Quantizer`], for statistics.
pub trait CastHook: std::fmt::Debug + Send + Sync {
    /// `x` in high precision was cast to `quantized`, in a forward or a backward pass, on any thread.
    ///
    /// # Errors
    /// An error fails the pass.
    fn on_cast(&self, x: &Tensor, quantized: &Quantized) -> Result<()>;
}

/// One cast from high precision to FP8.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Quantizer {
    /// Format, rounding and overflow.
    pub cast: Cast,
    /// See [`Quantizer::with_stochastic`].
    pub stochastic: Option<Stochastic>,
    /// Which elements share a scale.
    pub granularity: Granularity,
    /// Where the scale comes from.
    pub source: ScaleSource,
    /// Incremented by every cast.
    pub counter: Option<CastCounter>,
    /// Notified of every cast; records amaxes.
    pub observer: Option<Observer>,
    /// Sees every cast; None costs nothing.
    pub hook: Option<Arc<dyn CastHook>>,
    /// See [`Quantizer::with_amax_bound`].
    pub amax_bound: Option<f32>,
    /// Whether its casts are noted for a repetition, or are one.
    pub recall: Option<Recall>,
}

impl Quantizer {
    /// A cast without a counter or an observer.
    pub fn new(cast: Cast, granularity: Granularity, source: ScaleSource) -> Self {
        Self {
            cast,
            stochastic: None,
            granularity,
            source,
            counter: None,
            observer: None,
            hook: None,
            amax_bound: None,
            recall: None,
        }
    }

    /// Dynamic scaling as in torchao: nearest-even, saturating, exact scales.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use fp8_candle::Quantizer;
    /// use fp8_core::{Contraction, Format, Granularity};
    ///
    /// let x = Tensor::new(&[[1f32, -2.0, 0.5]], &Device::Cpu)?;
    /// let quantizer = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise);
    /// let quantized = quantizer.quantize(&x, Contraction::Cols)?;
    /// assert_eq!(quantized.quant_scale.to_vec2::<f32>()?, [[448.0 / 2.0]]); // MAX / amax
    /// # Ok::<(), fp8_candle::Error>(())
    /// ```
    pub fn dynamic(format: fp8_core::Format, granularity: Granularity) -> Self {
        let source = ScaleSource::Current {
            policy: ScalePolicy::dynamic(granularity),
            power_of_two: false,
        };
        Self::new(Cast::new(format), granularity, source)
    }

    /// The same cast with another format, rounding or overflow.
    pub fn with_cast(self, cast: Cast) -> Self {
        Self { cast, ..self }
    }

    /// The same cast with stochastic rounding, with new bits each time: key and number of casts are those of `slot`.
    pub fn with_stochastic(self, slot: Slot, seed: u64) -> Self {
        Self {
            stochastic: Some(Stochastic::new(slot, seed)),
            ..self
        }
    }

    /// The same cast with its random bits drawn otherwise; changes nothing where rounding is not stochastic. See [`Draw`].
    pub fn with_draw(mut self, draw: Draw) -> Self {
        if let Some(stochastic) = &mut self.stochastic {
            stochastic.draw = draw;
        }
        self
    }

    /// The same cast with another granularity.
    pub fn with_granularity(self, granularity: Granularity) -> Self {
        Self {
            granularity,
            ..self
        }
    }

    /// The same cast with its scale from another source.
    pub fn with_source(self, source: ScaleSource) -> Self {
        Self { source, ..self }
    }

    /// The same cast with another counter.
    pub fn with_counter(self, counter: impl Into<Option<CastCounter>>) -> Self {
        Self {
            counter: counter.into(),
            ..self
        }
    }

    /// The same cast seen by another hook.
    pub fn with_hook(self, hook: impl Into<Option<Arc<dyn CastHook>>>) -> Self {
        Self {
            hook: hook.into(),
            ..self
        }
    }

    /// The same cast noted for a repetition, or repeated: see [`Recall`].
    pub fn with_recall(self, recall: impl Into<Option<Recall>>) -> Self {
        Self {
            recall: recall.into(),
            ..self
        }
    }

    /// The same cast with another observer.
    pub fn with_observer(self, observer: impl Into<Option<Observer>>) -> Self {
        Self {
            observer: observer.into(),
            ..self
        }
    }

    /// Whether to floor the quant_scale to a power of two; only for [`ScaleSource::Current`].
    pub fn with_power_of_two(mut self, on: bool) -> Self {
        if let ScaleSource::Current { power_of_two, .. } = &mut self.source {
            *power_of_two = on;
        }
        self
    }

    /// An upper bound for the amaxes from which scales are made: a larger one counts as `bound`, and values beyond it saturate.
    /// Only for [`ScaleSource::Current`].
    pub fn with_amax_bound(self, bound: impl Into<Option<f32>>) -> Self {
        Self {
            amax_bound: bound.into(),
            ..self
        }
    }

    /// Whether one quantized copy serves GEMMs over either dimension.
    pub fn is_symmetric(&self) -> bool {
        match self.granularity {
            Granularity::Tensorwise => true,
            Granularity::Rowwise | Granularity::Mx => false,
            Granularity::Blockwise { rows, cols } => rows == cols,
        }
    }

    /// Casts `x`, seen as a matrix `[product of the leading dims, last dim]`, for a GEMM that sums over
    /// `contraction`.
    ///
    /// # Errors
    /// If `x` is not f32, bf16, f16 or f64, a static scale is missing, or a fixed scale does not fit the granularity.
    pub fn quantize(&self, x: &Tensor, contraction: Contraction) -> Result<Quantized> {
        self.quantize_for(x, contraction, false)
    }

    /// [`Quantizer::quantize`]. With `both`, the codes will also be used by a GEMM over the other dimension, so a device
    /// that needs another copy for it writes both from one read.
    pub(crate) fn quantize_for(
        &self,
        x: &Tensor,
        contraction: Contraction,
        both: bool,
    ) -> Result<Quantized> {
        if !matches!(
            x.dtype(),
            DType::F32 | DType::BF16 | DType::F16 | DType::F64
        ) {
            return Err(Error::DType {
                op: "quantize",
                what: "the tensor",
                expected: "f32, bf16, f16 or f64",
                got: x.dtype(),
            });
        }
        let backend = backend(x.device())?;
        let noted = self.recall.as_ref().and_then(Recall::next);
        let noted_key = noted.as_ref().and_then(|noted| noted.key);
        let cast = match (&self.stochastic, noted_key) {
            (None, _) => self.cast,
            (Some(_), Some(key)) => self.cast.with_rounding(Rounding::Stochastic(key)),
            (Some(stochastic), None) => {
                let key = stochastic.key(x)?;
                self.cast.with_rounding(Rounding::Stochastic(key))
            }
        };
        let (rows, cols) = matrix_dims(x.dims());
        let grid = self.granularity.grid(rows, cols, contraction);
        let orientation = backend.orientation(contraction, both && self.is_symmetric());
        let x = x.detach().contiguous()?;
        let check_count = |quant_scale: &Tensor| {
            if quant_scale.elem_count() == grid.len() {
                return Ok(());
            }
            let granularity = self.granularity;
            Err(Error::Shape {
                op: "quantize",
                what: "the scale",
                expected: format!(
                    "{} elements for {rows}x{cols} values, {granularity}",
                    grid.len()
                ),
                got: quant_scale.dims().to_vec(),
            })
        };
        let encode = |quant_scale: &Tensor| {
            check_count(quant_scale)?;
            backend.quantize(&x, &grid, quant_scale, &cast, orientation)
        };
        // The amax is free beside the cast, and shows Inf and NaN.
        let measures =
            noted.is_none() && self.observer.as_ref().is_some_and(|o| o.record) && grid.len() == 1;
        let measured = |quant_scale: &Tensor| -> Result<(Codes, Option<Tensor>)> {
            if !measures {
                return Ok((encode(quant_scale)?, None));
            }
            check_count(quant_scale)?;
            let (codes, amax) = backend.quantize_with_amax(&x, quant_scale, &cast, orientation)?;
            Ok((codes, Some(amax)))
        };
        let (codes, quant_scale, dequant_scale, amax) = match &self.source {
            ScaleSource::Current {
                policy,
                power_of_two,
            } => {
                let current = CurrentScale {
                    policy: *policy,
                    power_of_two: *power_of_two,
                };
                let made = match self.amax_bound {
                    None => backend.quantize_current(&x, &grid, current, &cast, orientation)?,
                    Some(bound) => {
                        let measured = backend.amax(&x, &grid)?;
                        let amax = measured.minimum(f64::from(bound))?;
                        let format = self.cast.format;
                        let quant_scale =
                            backend.quant_scale(&amax, format, *policy, *power_of_two)?;
                        CurrentCast {
                            codes: encode(&quant_scale)?,
                            dequant_scale: backend.reciprocal(&quant_scale)?,
                            quant_scale,
                            amax: measured,
                        }
                    }
                };
                (
                    made.codes,
                    made.quant_scale,
                    made.dequant_scale,
                    Some(made.amax),
                )
            }
            ScaleSource::Delayed { slot, rule, first } => {
                let format = self.cast.format;
                let (quant_scale, dequant_scale) = if let Some(scales) = scales_of(&noted) {
                    scales
                } else if *first == FirstScale::OwnAmax && slot.is_initial()? {
                    let whole = ScaleGrid::tensorwise(rows, cols);
                    let amax = backend.amax(&x, &whole)?.reshape(1)?;
                    slot.made_scale(&amax, format, rule)?
                } else {
                    slot.delayed_scale(format, rule)?
                };
                let (codes, amax) = measured(&quant_scale)?;
                (codes, quant_scale, dequant_scale, amax)
            }
            ScaleSource::Static(slot) => {
                let (quant_scale, dequant_scale) = match scales_of(&noted) {
                    Some(scales) => scales,
                    None => slot.static_scale(self.cast.format)?,
                };
                let (codes, amax) = measured(&quant_scale)?;
                (codes, quant_scale, dequant_scale, amax)
            }
            ScaleSource::Unscaled => {
                let one = Tensor::ones(grid.len().max(1), DType::F32, x.device())?;
                let one = one.narrow(0, 0, grid.len())?;
                let (codes, amax) = measured(&one)?;
                (codes, one.clone(), one, amax)
            }
            ScaleSource::Fixed { dequant_scale } => {
                let dequant_scale = dequant_scale.to_device(x.device())?;
                let quant_scale = backend.reciprocal(&dequant_scale)?;
                let codes = encode(&quant_scale)?;
                (codes, quant_scale, dequant_scale, None)
            }
        };
        let made = Made {
            codes,
            scales: [quant_scale, dequant_scale],
            amax,
            cast,
        };
        let repeated = noted.is_some();
        let quantized = self.finish(made, x.dims(), contraction, repeated)?;
        if let Some(hook) = self.hook.as_ref().filter(|_| !repeated) {
            hook.on_cast(&x, &quantized)?;
        }
        Ok(quantized)
    }
}

/// What a cast has computed.
struct Made {
    codes: Codes,
    /// quant_scale and dequant_scale.
    scales: [Tensor; 2],
    amax: Option<Tensor>,
    cast: Cast,
}

impl Quantizer {
    /// Counts, records and notes a cast, but for the hook.
    fn finish(
        &self,
        made: Made,
        dims: &[usize],
        contraction: Contraction,
        repeated: bool,
    ) -> Result<Quantized> {
        let Made {
            codes,
            scales: [quant_scale, dequant_scale],
            amax,
            cast,
        } = made;
        if let Some(counter) = self.counter.as_ref().filter(|_| !repeated) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(observer) = self.observer.as_ref().filter(|_| !repeated) {
            let makes_scales = matches!(self.source, ScaleSource::Delayed { .. });
            observer.note(amax.as_ref(), makes_scales)?;
        }
        let tensor = Fp8Tensor::from_codes(
            codes,
            dims,
            self.cast.format,
            (self.granularity, contraction),
            dequant_scale,
        )?;
        let quantized = Quantized {
            tensor,
            quant_scale,
            amax,
            cast,
            repeated,
        };
        if let Some(recall) = &self.recall {
            recall.note(&quantized, self.has_scales_of_table())?;
        }
        Ok(quantized)
    }
}

/// The scales of a cast to repeat.
fn scales_of(noted: &Option<Noted>) -> Option<(Tensor, Tensor)> {
    noted.as_ref().and_then(|noted| noted.scales.clone())
}

impl Fp8Tensor {
    /// Quantizes `x` (f32, bf16, f16 or f64, any shape) for a GEMM that sums over `contraction` of
    /// `[product of the leading dims, last dim]`. An observer in `quantizer` records the amax.
    pub fn quantize(x: &Tensor, quantizer: &Quantizer, contraction: Contraction) -> Result<Self> {
        Ok(quantizer.quantize(x, contraction)?.tensor)
    }
}
