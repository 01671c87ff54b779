//! What casts do to the tensors of each layer: amax, scales, saturation, underflow, signal to noise.

mod curves;
mod drawing;
mod log;
mod observer;

pub use curves::{StatsCurves, StatsQuantity};
pub use log::StatsLog;
pub(crate) use observer::hook;
pub use observer::{CastEvent, CastObserver};

use crate::config::Operand;
use candle_core::{DType, Tensor};
use fp8_candle::Quantized;
use fp8_core::{Cast, Format, Granularity, Overflow};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Measures every cast of the layers inside a guard that was given it. Clones share what was measured. A weight that has not
/// changed since it was cast is not cast again, and so has no row.
///
/// ```
/// # use candle_core::{Device, Module, Tensor};
/// # use fp8_recipes::{Autocast, CastStats, PrepareOptions, RecipeName, nn, prepare_fp8, with_fp8};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let x = Tensor::randn(0f32, 1., (4, 32), &Device::Cpu)?;
/// # let layer = nn::Linear::new(Tensor::randn(0f32, 1., (16, 32), &Device::Cpu)?, None).with_path("fc");
/// # prepare_fp8(&layer, &PrepareOptions::default())?;
/// let stats = CastStats::default();
/// with_fp8(Autocast::new(RecipeName::Tensorwise).with_stats(&stats), || layer.forward(&x))?;
/// let report = stats.report();
/// println!("{report}");
/// let input = &report.rows[0];
/// assert_eq!((input.layer.as_str(), input.operand, input.saturated), ("fc", "input", 0));
/// assert!(input.sqnr_db.unwrap() > 25.);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Default)]
pub struct CastStats(Arc<Mutex<Measured>>);

type Measured = BTreeMap<(Arc<str>, usize), Measure>;

/// The casts of one operand of one layer.
#[derive(Debug, Clone)]
struct Measure {
    operand: Operand,
    format: Format,
    granularity: Granularity,
    casts: u64,
    elements: u64,
    amax: f32,
    quant_scales: (f32, f32),
    saturated: u64,
    underflowed: u64,
    non_finite: u64,
    /// Sums of squares of values and of errors.
    signal: f64,
    noise: f64,
}

impl CastStats {
    fn lock(&self) -> MutexGuard<'_, Measured> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was measured so far, layer by layer.
    pub fn report(&self) -> StatsReport {
        report_of(&self.lock())
    }

    /// What was measured so far; forgets it.
    pub fn take(&self) -> StatsReport {
        let measured = std::mem::take(&mut *self.lock());
        report_of(&measured)
    }

    /// Measures one cast.
    pub(crate) fn measure(
        &self,
        layer: &Arc<str>,
        operand: Operand,
        x: &Tensor,
        quantized: &Quantized,
    ) -> fp8_candle::Result<()> {
        let values = x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let scales = quantized.quant_scale.flatten_all()?.to_vec1::<f32>()?;
        let codes = &quantized.tensor;
        let decoded = codes
            .dequantize(DType::F32)?
            .flatten_all()?
            .to_vec1::<f32>()?;
        let grid = codes.grid();
        let format = codes.format();
        let saturates = smallest_overflow(format);
        let mut stats = self.lock();
        let key = (layer.clone(), operand as usize);
        let measure = stats.entry(key).or_insert_with(|| Measure {
            operand,
            format,
            granularity: codes.granularity(),
            casts: 0,
            elements: 0,
            amax: 0.,
            quant_scales: (f32::INFINITY, 0.),
            saturated: 0,
            underflowed: 0,
            non_finite: 0,
            signal: 0.,
            noise: 0.,
        });
        (measure.format, measure.granularity) = (format, codes.granularity());
        measure.casts += 1;
        measure.elements += values.len() as u64;
        for &scale in &scales {
            let (least, most) = measure.quant_scales;
            measure.quant_scales = (least.min(scale), most.max(scale));
        }
        let cols = grid.cols().max(1);
        let rows = values.chunks(cols).zip(decoded.chunks(cols));
        for (row, (values, decoded)) in rows.enumerate() {
            for (col, (&value, &back)) in values.iter().zip(decoded).enumerate() {
                let scaled = value * scales[grid.index(row, col)];
                if value.is_finite() {
                    measure.amax = measure.amax.max(value.abs());
                    measure.saturated += u64::from(scaled.abs() >= saturates);
                }
                if !value.is_finite() || !back.is_finite() {
                    measure.non_finite += 1;
                    continue;
                }
                measure.underflowed += u64::from(value != 0. && back == 0.);
                measure.signal += f64::from(value).powi(2);
                measure.noise += (f64::from(value) - f64::from(back)).powi(2);
            }
        }
        Ok(())
    }
}

fn report_of(measured: &Measured) -> StatsReport {
    let rows = measured.iter();
    let rows = rows.map(|((layer, _), measure)| measure.row(layer));
    StatsReport {
        rows: rows.collect(),
    }
}

/// The smallest magnitude that saturates, which is decided after rounding: a little more than the maximum still rounds to it.
fn smallest_overflow(format: Format) -> f32 {
    let cast = Cast::new(format).with_overflow(Overflow::NonFinite);
    let overflows = |bits| {
        !format
            .decode(cast.encode(f32::from_bits(bits), 0))
            .is_finite()
    };
    // Magnitudes are ordered as their bits are.
    let (mut fits, mut beyond) = (format.max().to_bits(), f32::INFINITY.to_bits());
    while beyond - fits > 1 {
        let middle = fits + (beyond - fits) / 2;
        match overflows(middle) {
            true => beyond = middle,
            false => fits = middle,
        }
    }
    f32::from_bits(beyond)
}

impl Measure {
    fn row(&self, layer: &str) -> StatsRow {
        let share = |count: u64| count as f64 / self.elements.max(1) as f64;
        let sqnr_db = 10. * (self.signal / self.noise).log10();
        StatsRow {
            layer: layer.to_string(),
            operand: self.operand.name(),
            format: self.format,
            granularity: self.granularity,
            casts: self.casts,
            elements: self.elements,
            amax: self.amax,
            quant_scale_min: self.quant_scales.0,
            quant_scale_max: self.quant_scales.1,
            saturated: self.saturated,
            saturated_share: share(self.saturated),
            underflowed: self.underflowed,
            underflowed_share: share(self.underflowed),
            non_finite: self.non_finite,
            sqnr_db: sqnr_db.is_finite().then_some(sqnr_db),
        }
    }
}

/// The casts of one operand of one layer since the statistics were last taken.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct StatsRow {
    /// Path of the layer.
    pub layer: String,
    /// Which of the six casts: `input`, `input_for_grad_weight`, `weight`, ... A copy that serves both GEMMs of an operand
    /// counts for the first.
    pub operand: &'static str,
    /// Format of the last cast.
    pub format: Format,
    /// Which elements shared a scale in the last cast.
    pub granularity: Granularity,
    /// Number of casts; a weight that is kept counts once.
    pub casts: u64,
    /// Elements of all casts.
    pub elements: u64,
    /// Largest finite magnitude.
    pub amax: f32,
    /// Smallest scale that multiplied values before the cast.
    pub quant_scale_min: f32,
    /// Largest scale that multiplied values before the cast.
    pub quant_scale_max: f32,
    /// Elements that were beyond the format's range once scaled and rounded, and became its maximum, or Inf or NaN where the
    /// recipe says so.
    pub saturated: u64,
    /// Their share of all elements.
    pub saturated_share: f64,
    /// Elements that became 0 and were not.
    pub underflowed: u64,
    /// Their share of all elements.
    pub underflowed_share: f64,
    /// Elements that were Inf or NaN, or became so; the signal to noise is without them.
    pub non_finite: u64,
    /// Signal to quantization noise, `10 log10(sum x^2 / sum (x - dequantized)^2)`; None where either sum is 0.
    pub sqnr_db: Option<f64>,
}

/// What [`CastStats`] has measured. Prints as a table; [`StatsReport::to_json`] for programs.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct StatsReport {
    /// A row for each layer and operand that was cast, sorted by layer.
    pub rows: Vec<StatsRow>,
}

impl StatsReport {
    /// The rows as a JSON list of objects.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::json!(self.rows)
    }
}

impl fmt::Display for StatsReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.rows.iter().map(|row| row.layer.len()).max();
        let width = width.unwrap_or(0).max("layer".len());
        write!(
            f,
            "{:width$}  {:27}  {:10}  {:>9}  {:>21}  {:>9}  {:>9}  {:>7}",
            "layer", "operand", "format", "amax", "quant_scale", "saturated", "underflow", "SQNR"
        )?;
        for row in &self.rows {
            let scales = match row.quant_scale_min == row.quant_scale_max {
                true => format!("{:.3e}", row.quant_scale_max),
                false => format!("{:.2e}..{:.2e}", row.quant_scale_min, row.quant_scale_max),
            };
            let sqnr = row
                .sqnr_db
                .map_or("-".to_string(), |db| format!("{db:.1} dB"));
            write!(
                f,
                "\n{:width$}  {:27}  {:10}  {:>9.2e}  {scales:>21}  {:>8.3}%  {:>8.3}%  {sqnr:>7}",
                row.layer,
                row.operand,
                row.format.to_string(),
                row.amax,
                100. * row.saturated_share,
                100. * row.underflowed_share,
            )?;
            if row.non_finite > 0 {
                write!(f, "  {} Inf or NaN", row.non_finite)?;
            }
        }
        Ok(())
    }
}
