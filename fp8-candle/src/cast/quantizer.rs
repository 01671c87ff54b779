//! One cast from high precision to FP8.

use crate::base::check::check_float;
use crate::base::data::matrix_dims;
use crate::base::error::{Result, internal, shape_error};
use crate::cast::replay::{RecordedCast, Replay};
use crate::cast::shards::Shards;
use crate::cast::spec::{CastCounter, CastHook, CastSpec, Observers, ScaleSource, applied_scale};
use crate::cast::state::{AmaxRecorder, Scales, Slot};
use crate::cast::stochastic::{Draw, Stochastic};
use crate::cast::tensor::{Fp8Tensor, Quantized};
use crate::device::{Codes, CurrentScale, ScalePolicy, backend};
use candle_core::{DType, Tensor};
use fp8_core::{Cast, Contraction, Format, Granularity, Rounding, ScaleGrid};
use std::sync::Arc;

/// One cast from high precision to FP8: what it computes, where its scales come from, and its observers.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Quantizer {
    /// What the cast computes.
    pub spec: CastSpec,
    /// Where the scales come from.
    pub source: ScaleSource,
    /// Notified of each cast.
    pub observers: Observers,
    /// Whether casts are recorded or replayed.
    pub(crate) replay: Option<Replay>,
}

impl Quantizer {
    /// A cast without observers.
    pub fn new(cast: Cast, granularity: Granularity, source: ScaleSource) -> Self {
        Self {
            spec: CastSpec::new(cast, granularity),
            source,
            observers: Observers::default(),
            replay: None,
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
    pub fn dynamic(format: Format, granularity: Granularity) -> Self {
        let source = ScaleSource::Current {
            policy: ScalePolicy::dynamic(granularity),
            power_of_two: false,
        };
        Self::new(Cast::new(format), granularity, source)
    }

    /// The same cast with stochastic rounding, with new bits each time: `slot` provides the key and counts the casts.
    pub fn with_stochastic(mut self, slot: Slot, seed: u64) -> Self {
        self.spec.stochastic = Some(Stochastic::new(slot, seed));
        self
    }

    /// The same cast with another way to draw random bits; no effect unless rounding is stochastic. See [`Draw`].
    pub fn with_draw(mut self, draw: Draw) -> Self {
        if let Some(stochastic) = &mut self.spec.stochastic {
            stochastic.draw = draw;
        }
        self
    }

    /// The same cast with another granularity.
    pub fn with_granularity(mut self, granularity: Granularity) -> Self {
        self.spec.granularity = granularity;
        self
    }

    /// The same cast with its scales from another source.
    pub fn with_source(self, source: ScaleSource) -> Self {
        Self { source, ..self }
    }

    /// The same cast with another counter.
    pub fn with_counter(mut self, counter: impl Into<Option<CastCounter>>) -> Self {
        self.observers.counter = counter.into();
        self
    }

    /// The same cast with another recorder of amaxes.
    pub fn with_recorder(mut self, recorder: impl Into<Option<AmaxRecorder>>) -> Self {
        self.observers.recorder = recorder.into();
        self
    }

    /// The same cast seen by another hook.
    pub fn with_hook(mut self, hook: impl Into<Option<Arc<dyn CastHook>>>) -> Self {
        self.observers.hook = hook.into();
        self
    }

    /// The same cast, recorded or replayed: see [`Recording`](crate::Recording).
    pub fn with_replay(self, replay: impl Into<Option<Replay>>) -> Self {
        Self {
            replay: replay.into(),
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
    pub fn with_amax_bound(mut self, bound: impl Into<Option<f32>>) -> Self {
        self.spec.amax_bound = bound.into();
        self
    }

    /// The same cast of a part of a tensor, with the scales of the whole.
    pub fn with_shards(mut self, shards: Shards) -> Self {
        self.spec.shards = (!shards.is_whole()).then(|| Arc::new(shards));
        self
    }

    /// The cast of the specification; it divides if the source of the scales says so.
    pub(crate) fn settled_cast(&self) -> Cast {
        let cast = self.spec.cast;
        cast.with_division(cast.divides || self.source.divides())
    }

    /// The recorded cast to replay now, if there is one.
    pub(super) fn next_replayed(&self) -> Option<Self> {
        Some(self.replay.as_ref()?.next()?.into())
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
        check_float("quantize", "the tensor", x)?;
        if let Some(recorded) = self.next_replayed() {
            return recorded.quantize_for(x, contraction, both);
        }
        let (spec, backend) = (&self.spec, backend(x.device())?);
        let cast = self.settled_cast();
        let cast = match &spec.stochastic {
            None => cast,
            Some(stochastic) => cast.with_rounding(Rounding::Stochastic(stochastic.key(x)?)),
        };
        let (rows, cols) = matrix_dims(x.dims());
        let grid = spec.granularity.grid(rows, cols, contraction);
        let orientation = backend.orientation(contraction, both && spec.is_symmetric());
        let x = x.detach().contiguous()?;
        let encode = |scales: &Scales| {
            let scale = applied_scale(&cast, scales);
            check_count(scale, &grid, spec.granularity)?;
            backend.quantize(&x, &grid, scale, &cast, orientation)
        };
        let encoded = |codes, scales, amax| Encoded {
            codes,
            scales,
            amax,
            cast,
        };
        // The cast measures the amax at no cost; it shows Inf and NaN.
        let measures = grid.len() == 1 && self.observers.training_recorder().is_some();
        let with_scales = |scales: Scales| -> Result<Encoded> {
            if !measures {
                return Ok(encoded(encode(&scales)?, scales, None));
            }
            let scale = applied_scale(&cast, &scales);
            check_count(scale, &grid, spec.granularity)?;
            let (codes, amax) = backend.quantize_with_amax(&x, scale, &cast, orientation)?;
            Ok(encoded(codes, scales, Some(amax)))
        };
        let encoded = match (&self.source, self.source.known_scales(cast.format)?) {
            (_, Some(scales)) => with_scales(scales)?,
            (ScaleSource::Delayed { slot, rule, .. }, None) => {
                let whole = ScaleGrid::tensorwise(rows, cols);
                let amax = backend.amax(&x, &whole)?.reshape(1)?;
                let amax = match &spec.shards {
                    Some(shards) => shards.reduce_whole(amax)?,
                    None => amax,
                };
                with_scales(slot.made_scale(&amax, cast.format, rule)?)?
            }
            (ScaleSource::Unscaled, None) => {
                let one = Tensor::ones(grid.len().max(1), DType::F32, x.device())?;
                let one = one.narrow(0, 0, grid.len())?;
                with_scales((one.clone(), one))?
            }
            (ScaleSource::Fixed { dequant_scale }, None) => {
                let dequant_scale = dequant_scale.to_device(x.device())?;
                let scales = (backend.reciprocal(&dequant_scale)?, dequant_scale);
                encoded(encode(&scales)?, scales, None)
            }
            (
                ScaleSource::Current {
                    policy,
                    power_of_two,
                },
                None,
            ) => {
                let current = CurrentScale {
                    policy: *policy,
                    power_of_two: *power_of_two,
                };
                if spec.amax_bound.is_none() && spec.shards.is_none() {
                    let made = backend.quantize_current(&x, &grid, current, &cast, orientation)?;
                    let scales = (made.quant_scale, made.dequant_scale);
                    encoded(made.codes, scales, Some(made.amax))
                } else {
                    let amax = backend.amax(&x, &grid)?;
                    let amax = match &spec.shards {
                        Some(shards) => {
                            shards.reduce(amax, &grid, (spec.granularity, contraction))?
                        }
                        None => amax,
                    };
                    let bounded = match spec.amax_bound {
                        Some(bound) => amax.minimum(f64::from(bound))?,
                        None => amax.clone(),
                    };
                    let scales = backend.scales(&bounded, cast.format, current)?;
                    encoded(encode(&scales)?, scales, Some(amax))
                }
            }
            (ScaleSource::Static(_) | ScaleSource::Known { .. }, None) => {
                internal!("a cast without scales")
            }
        };
        let quantized = self.finish(encoded, x.dims(), contraction)?;
        if let Some(hook) = &self.observers.hook {
            hook.on_cast(&x, &quantized)?;
        }
        Ok(quantized)
    }

    /// Counts, records and wraps codes; the hook is the caller's.
    pub(super) fn finish(
        &self,
        encoded: Encoded,
        dims: &[usize],
        contraction: Contraction,
    ) -> Result<Quantized> {
        let Encoded {
            codes,
            scales: (quant_scale, dequant_scale),
            amax,
            cast,
        } = encoded;
        self.observers
            .count_and_record(amax.as_ref(), self.source.is_delayed())?;
        let granularity = self.spec.granularity;
        let quantized = Quantized {
            tensor: Fp8Tensor::from_codes(
                codes,
                dims,
                cast.format,
                (granularity, contraction),
                dequant_scale,
            )?,
            quant_scale,
            amax,
            cast,
        };
        if let Some(replay) = &self.replay {
            replay.record(&self.spec, &self.source, &quantized)?;
        }
        Ok(quantized)
    }
}

/// The output of a kernel that casts.
pub(super) struct Encoded {
    pub(super) codes: Codes,
    pub(super) scales: Scales,
    pub(super) amax: Option<Tensor>,
    pub(super) cast: Cast,
}

fn check_count(quant_scale: &Tensor, grid: &ScaleGrid, granularity: Granularity) -> Result<()> {
    if quant_scale.elem_count() == grid.len() {
        return Ok(());
    }
    let (rows, cols) = (grid.rows(), grid.cols());
    Err(shape_error(
        "quantize",
        "the scale",
        format!(
            "{} elements for {rows}x{cols} values, {granularity}",
            grid.len()
        ),
        quant_scale.dims(),
    ))
}

impl From<RecordedCast> for Quantizer {
    fn from(recorded: RecordedCast) -> Self {
        Self {
            spec: recorded.spec,
            source: recorded.source,
            observers: Observers::default(),
            replay: None,
        }
    }
}

/// A result quantized and dequantized by its cast, if it has one.
pub(crate) fn recast(x: Tensor, cast: Option<&Quantizer>) -> Result<Tensor> {
    match cast {
        None => Ok(x),
        Some(cast) => {
            let quantized = cast.quantize(&x, Contraction::Cols)?.tensor;
            quantized.dequantize(x.dtype())
        }
    }
}

impl Fp8Tensor {
    /// Quantizes `x` (f32, bf16, f16 or f64, any shape) for a GEMM that sums over `contraction` of
    /// `[product of the leading dims, last dim]`. A recorder in `quantizer` records the amax.
    pub fn quantize(x: &Tensor, quantizer: &Quantizer, contraction: Contraction) -> Result<Self> {
        Ok(quantizer.quantize(x, contraction)?.tensor)
    }
}
