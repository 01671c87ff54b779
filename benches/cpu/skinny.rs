//! Few tokens times frozen FP8 weights, the input cast in the call: serving.

use crate::inputs::{check, last_level_cache, normal};
use crate::peaks::sum;
use crate::rows::{Bars, Work};
use crate::session::{Field, Limit, Session};
use crate::timing::Contestant;
use anyhow::Result;
use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor};
use candle_core::{DType, Device, Module, Tensor};
use fp8::fp8_candle::{Fp8Tensor, Quantizer};
use fp8::fp8_core::{Contraction, Format, Granularity};
use fp8::nn::{InputScaling, Linear, StaticWeight};
use std::hint::black_box;

/// Weights that stay in cache.
pub fn run(session: &Session) -> Result<()> {
    in_cache(session, (32, 3072, 768))?;
    in_cache(session, (128, 1024, 1024))
}

/// The weight in cache with enough rows to be bound by arithmetic.
pub fn run_wide(session: &Session) -> Result<()> {
    in_cache(session, (128, 1024, 1024))
}

fn in_cache(session: &Session, (m, n, k): (usize, usize, usize)) -> Result<()> {
    let case = session.name(format!("fp8 weight m={m} n={n} k={k}"));
    if !session.wants(&case) {
        return Ok(());
    }
    let weights = Weights::new((n, k), 0, session.forced.is_none())?;
    let work = Work::Flop(2. * (m * n * k) as f64);
    weights.race(session, case, m, bars(session, 2.4, None), work)
}

/// Weights that come from memory at every call.
pub fn run_from_memory(session: &Session) -> Result<()> {
    let (n, k) = (4096, 4096);
    let cases = [(1, 5.5, Some(0.9)), (8, 7., None)].map(|(m, bar, peak)| {
        let case = session.name(format!("fp8 weight from memory m={m} n={n} k={k}"));
        (case, m, bars(session, bar, peak))
    });
    if !cases.iter().any(|(case, ..)| session.wants(case)) {
        return Ok(());
    }
    let bytes = (3 * last_level_cache() / 2).min(1 << 30);
    let weights = Weights::new((n, k), bytes, !session.quick())?;
    for (case, m, bars) in cases {
        if session.wants(&case) {
            weights.race(session, case, m, bars, Work::Read((n * k) as f64))?;
        }
    }
    Ok(())
}

/// With bf16 units the ratio to f32; with f32 units at least the speed of Q8_0, and a fraction of the peak.
fn bars(session: &Session, ratio: f64, peak: Option<f64>) -> Bars {
    match session.has_f32_units() {
        true => Bars {
            peak,
            q8_0: Some(1.),
            ..Bars::default()
        },
        false => Some(ratio).into(),
    }
}

/// One weight in every format, in as many copies as fill some bytes.
struct Weights {
    k: usize,
    ours: Vec<Linear>,
    f32: Vec<candle_nn::Linear>,
    /// Empty if it is left out: widening a large weight takes long.
    bf16: Vec<candle_nn::Linear>,
    q8_0: Vec<QMatMul>,
}

impl Weights {
    fn new((n, k): (usize, usize), bytes: usize, with_bf16: bool) -> Result<Self> {
        let weight = (normal(1, (n, k))? * 0.02)?;
        let copies = |bytes_per_weight: usize| 0..bytes.div_ceil(bytes_per_weight).max(1);
        let quantizer = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise);
        let codes = Fp8Tensor::quantize(&weight, &quantizer, Contraction::Cols)?;
        let ours = copies(n * k).map(|_| -> Result<Linear> {
            let copy = Fp8Tensor::from_parts(
                codes.codes().copy()?,
                Format::E4M3,
                Granularity::Tensorwise,
                Contraction::Cols,
                codes.dequant_scale().clone(),
            )?;
            let weight = StaticWeight::new(
                &copy,
                InputScaling::DynamicPerToken {
                    power_of_two: false,
                    amax_bound: None,
                },
                "weight",
            )?;
            Ok(Linear::from_static(weight, None, "weight"))
        });
        let plain = |weight: &Tensor| Ok(candle_nn::Linear::new(weight.copy()?, None));
        let narrow = weight.to_dtype(DType::BF16)?;
        let q8_0 = QTensor::quantize(&weight, GgmlDType::Q8_0)?;
        let blocks = q8_0.data()?;
        let q8_0 = copies(blocks.len()).map(|_| -> Result<QMatMul> {
            let blocks = blocks.as_ref().into();
            let storage = QStorage::from_data(blocks, &Device::Cpu, GgmlDType::Q8_0)?;
            Ok(QMatMul::from_qtensor(QTensor::new(storage, (n, k))?)?)
        });
        Ok(Self {
            k,
            ours: ours.collect::<Result<_>>()?,
            f32: copies(4 * n * k)
                .map(|_| plain(&weight))
                .collect::<Result<_>>()?,
            bf16: copies(2 * n * k)
                .filter(|_| with_bf16)
                .map(|_| plain(&narrow))
                .collect::<Result<_>>()?,
            q8_0: q8_0.collect::<Result<_>>()?,
        })
    }

    fn race(
        &self,
        session: &Session,
        case: String,
        m: usize,
        bars: Bars,
        work: Work,
    ) -> Result<()> {
        let x = normal(2, (m, self.k))?;
        let narrow = x.to_dtype(DType::BF16)?;
        check(
            &case,
            &self.ours[0].forward(&x)?,
            &self.f32[0].forward(&x)?,
            0.1,
        )?;
        // The first call may repack a weight.
        for weight in &self.q8_0 {
            black_box(weight.forward(&x)?);
        }
        let with_bf16 = !self.bf16.is_empty();
        let field = Field {
            ours: in_turn(&self.ours, &x),
            f32: Some(in_turn(&self.f32, &x)),
            bf16: with_bf16.then(|| in_turn(&self.bf16, &narrow).optional()),
            q8_0: session.forced.is_none().then(|| in_turn(&self.q8_0, &x)),
        };
        let bytes = match work {
            Work::Flop(_) => vec![],
            Work::Read(bytes) => vec![vec![1u64; bytes as usize / 8]; self.ours.len()],
        };
        let limit = match work {
            Work::Flop(flop) => session.multiply_adds(flop),
            Work::Read(_) => Some(Limit {
                contestant: reading_in_turn(&bytes, session.threads),
                share: 1.,
            }),
        };
        let times = session.time_beside(field, limit)?;
        session.report_ratio(case, bars, times, work)
    }
}

/// Every run reads the next of `all`, with so many threads.
fn reading_in_turn(all: &[Vec<u64>], threads: usize) -> Contestant<'_> {
    let mut all = all.iter().cycle();
    Contestant::new(move || {
        if let Some(bytes) = all.next() {
            let parts = bytes.chunks(bytes.len().div_ceil(threads).max(1));
            fp8::fp8_candle::parallel::for_each(parts, |part| {
                black_box(sum(black_box(part)));
            });
        }
        Ok(())
    })
}

/// Every run takes the next of `layers`.
fn in_turn<'a>(layers: &'a [impl Module], x: &'a Tensor) -> Contestant<'a> {
    let mut layers = layers.iter().cycle();
    Contestant::new(move || {
        if let Some(layer) = layers.next() {
            black_box(layer.forward(x)?);
        }
        Ok(())
    })
}
