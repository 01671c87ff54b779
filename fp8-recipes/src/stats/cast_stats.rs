//! Measuring casts.

use super::report::{StatsReport, StatsRow};
use crate::config::Operand;
use candle_core::{DType, Tensor};
use fp8_candle::Quantized;
use fp8_core::{Cast, Format, Granularity, Overflow};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Measures every cast of the layers inside a guard ([`Autocast::with_stats`](crate::Autocast::with_stats)). Clones share their
/// measurements. A weight that has not changed since its last cast is not cast again, so it has no row.
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

    /// The measurements so far, layer by layer.
    pub fn report(&self) -> StatsReport {
        report_of(&self.lock())
    }

    /// Takes the measurements so far and starts anew.
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

/// The smallest magnitude that saturates. Saturation is decided after rounding, so values slightly above the maximum still round to
/// it.
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
