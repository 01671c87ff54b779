//! Measuring casts.

use super::report::{StatsReport, StatsRow};
use crate::config::Operand;
use candle_core::{DType, Tensor};
use fp8_candle::{Fp8Tensor, Quantized};
use fp8_core::{Cast, Format, Overflow};
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
pub struct CastStats(Arc<Mutex<Measures>>);

type Measures = BTreeMap<(Arc<str>, Operand), Measure>;

/// The casts of one operand of one layer.
#[derive(Debug)]
struct Measure {
    /// Its shares and its signal to noise are computed by [`Measure::finished`].
    row: StatsRow,
    /// Sums of squares of values and of errors.
    signal: f64,
    noise: f64,
}

impl CastStats {
    fn lock(&self) -> MutexGuard<'_, Measures> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The measurements so far, layer by layer.
    pub fn report(&self) -> StatsReport {
        report_of(&self.lock())
    }

    /// Takes the measurements so far and starts again.
    pub fn take(&self) -> StatsReport {
        report_of(&std::mem::take(&mut *self.lock()))
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
        let measure = stats.entry((layer.clone(), operand));
        let measure = measure.or_insert_with(|| Measure::new(layer, operand, codes));
        let row = &mut measure.row;
        (row.format, row.granularity) = (format, codes.granularity());
        row.casts += 1;
        row.elements += values.len() as u64;
        for &scale in &scales {
            row.quant_scale_min = row.quant_scale_min.min(scale);
            row.quant_scale_max = row.quant_scale_max.max(scale);
        }
        let cols = grid.cols().max(1);
        let rows = values.chunks(cols).zip(decoded.chunks(cols));
        for (i, (values, decoded)) in rows.enumerate() {
            for (col, (&value, &back)) in values.iter().zip(decoded).enumerate() {
                let scaled = value * scales[grid.index(i, col)];
                if value.is_finite() {
                    row.amax = row.amax.max(value.abs());
                    row.saturated += u64::from(scaled.abs() >= saturates);
                }
                if !value.is_finite() || !back.is_finite() {
                    row.non_finite += 1;
                    continue;
                }
                row.underflowed += u64::from(value != 0. && back == 0.);
                measure.signal += f64::from(value).powi(2);
                measure.noise += (f64::from(value) - f64::from(back)).powi(2);
            }
        }
        Ok(())
    }
}

fn report_of(measures: &Measures) -> StatsReport {
    StatsReport {
        rows: measures.values().map(Measure::finished).collect(),
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
    fn new(layer: &str, operand: Operand, codes: &Fp8Tensor) -> Self {
        let row = StatsRow {
            layer: layer.to_string(),
            operand: operand.name(),
            format: codes.format(),
            granularity: codes.granularity(),
            casts: 0,
            elements: 0,
            amax: 0.,
            quant_scale_min: f32::INFINITY,
            quant_scale_max: 0.,
            saturated: 0,
            saturated_share: 0.,
            underflowed: 0,
            underflowed_share: 0.,
            non_finite: 0,
            sqnr_db: None,
        };
        Self {
            row,
            signal: 0.,
            noise: 0.,
        }
    }

    fn finished(&self) -> StatsRow {
        let mut row = self.row.clone();
        let share = |count: u64| count as f64 / row.elements.max(1) as f64;
        row.saturated_share = share(row.saturated);
        row.underflowed_share = share(row.underflowed);
        let sqnr_db = 10. * (self.signal / self.noise).log10();
        row.sqnr_db = sqnr_db.is_finite().then_some(sqnr_db);
        row
    }
}
