//! Casts of a large tensor in bytes per second, against a copy on the device.

use crate::race::Contestant;
use crate::rows::Metric;
use crate::session::{Measured, Session, check};
use anyhow::Result;
use candle_core::{DType, Tensor};
use fp8::fp8_candle::Quantizer;
use fp8::fp8_candle::device::{Backend, CurrentScale, Orientation, ScalePolicy, backend};
use fp8::fp8_core::{Cast, Contraction, Format, Granularity, ScaleGrid};

/// A 1 GiB tensor of bf16.
const SHAPE: (usize, usize) = (16384, 32768);

const CAST: Cast = Cast::new(Format::E4M3);
const CURRENT: CurrentScale = CurrentScale {
    policy: ScalePolicy::Dynamic,
    power_of_two: true,
};

/// The tensors to cast, and the backend.
struct Input {
    backend: &'static dyn Backend,
    xs: [Tensor; 2],
    tensorwise: ScaleGrid,
    quant_scale: Tensor,
    codes: Tensor,
    dequant_scale: Tensor,
}

type Run = fn(&Input, &Tensor) -> candle_core::Result<()>;

/// Name, bytes moved per value, bar, and the call. Values are read twice where a scale depends on the whole tensor (or a whole
/// column).
const CASES: [(&str, f64, Option<f64>, Run); 9] = [
    ("cast", 3., None, |input, x| {
        input.quantize(x, Orientation::RowMajor)
    }),
    ("cast + transpose + amax", 4., Some(0.8), |input, x| {
        let both = Orientation::Both;
        let backend = input.backend;
        backend.quantize_with_amax(x, &input.quant_scale, &CAST, both)?;
        Ok(())
    }),
    ("amax", 2., None, |input, x| {
        input.backend.amax(x, &input.tensorwise)?;
        Ok(())
    }),
    ("amax, then cast + transpose", 6., None, |input, x| {
        input.current(
            x,
            Granularity::Tensorwise,
            Contraction::Cols,
            Orientation::Both,
        )
    }),
    ("rowwise scale + cast", 3., None, |input, x| {
        input.current(
            x,
            Granularity::Rowwise,
            Contraction::Cols,
            Orientation::RowMajor,
        )
    }),
    ("scales of groups of 128 + cast", 3., None, |input, x| {
        input.groups(x, 128)
    }),
    ("scales of groups of 32 + cast", 3., None, |input, x| {
        input.groups(x, 32)
    }),
    (
        "columnwise scale + cast, transposed",
        5.,
        None,
        |input, x| {
            input.current(
                x,
                Granularity::Rowwise,
                Contraction::Rows,
                Orientation::Transposed,
            )
        },
    ),
    ("dequantize", 3., None, |input, _| {
        let Input {
            backend,
            codes,
            tensorwise,
            dequant_scale,
            ..
        } = input;
        backend.dequantize(codes, Format::E4M3, tensorwise, dequant_scale, DType::BF16)?;
        Ok(())
    }),
];

impl Input {
    fn new(session: &Session) -> Result<Self> {
        let shape = (session.size(SHAPE.0), session.size(SHAPE.1));
        let x = session.normal(shape, DType::BF16)?;
        let quantizer = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise);
        let quantized = quantizer.quantize(&x, Contraction::Cols)?;
        let back = quantized.tensor.dequantize(DType::BF16)?;
        check("cast: to E4M3 and back", &back, &x, 0.05)?;
        Ok(Self {
            backend: backend(&session.device)?,
            xs: [session.normal(shape, DType::BF16)?, x],
            tensorwise: ScaleGrid::tensorwise(shape.0, shape.1),
            quant_scale: quantized.quant_scale.reshape(1)?,
            codes: quantized.tensor.codes().clone(),
            dequant_scale: quantized.tensor.dequant_scale().clone(),
        })
    }

    fn quantize(&self, x: &Tensor, orientation: Orientation) -> candle_core::Result<()> {
        let scale = &self.quant_scale;
        self.backend
            .quantize(x, &self.tensorwise, scale, &CAST, orientation)?;
        Ok(())
    }

    /// The cast of groups of `cols` neighbouring values of a row, each with a scale of its own.
    fn groups(&self, x: &Tensor, cols: usize) -> candle_core::Result<()> {
        self.current(
            x,
            Granularity::Blockwise { rows: 1, cols },
            Contraction::Cols,
            Orientation::RowMajor,
        )
    }

    fn current(
        &self,
        x: &Tensor,
        granularity: Granularity,
        contraction: Contraction,
        orientation: Orientation,
    ) -> candle_core::Result<()> {
        let (rows, cols) = x.dims2()?;
        let grid = granularity.grid(rows, cols, contraction);
        self.backend
            .quantize_current(x, &grid, CURRENT, &CAST, orientation)?;
        Ok(())
    }
}

/// Every case and the copy in one race.
pub fn run(session: &Session) -> Result<()> {
    let cases: Vec<_> = CASES
        .iter()
        .map(|(name, ..)| format!("{name} of 1 GiB bf16, e4m3"))
        .zip(CASES)
        .filter(|(case, _)| session.wants(case))
        .collect();
    if cases.is_empty() {
        return Ok(());
    }
    let input = &Input::new(session)?;
    let elements = input.xs[0].elem_count() as f64;
    let copy = Contestant::new(|turn| Ok(input.xs[turn % 2].copy()?));
    let ours = cases.iter().map(|(_, (_, _, _, run))| {
        Contestant::new(move |turn| Ok(run(input, &input.xs[turn % 2])?)).queued()
    });
    let contestants = [copy.queued()].into_iter().chain(ours).collect();
    let times = session.race(contestants)?;
    let copied = 4. * elements;
    let bandwidth = copied / times[0];
    let measured = |ms, bytes| Measured {
        ours_ms: ms,
        bytes: Some(bytes),
        ..Measured::default()
    };
    session.report(
        "copy of 1 GiB on the device",
        (Metric::GbPerS, Some(bandwidth * 1e-6)),
        None,
        measured(times[0], copied),
    );
    for ((case, (_, per_value, bar, _)), &ms) in cases.into_iter().zip(&times[1..]) {
        let bytes = per_value * elements;
        let share = bytes / ms / bandwidth;
        let value = (Metric::CopyShare, Some(share));
        session.report(case, value, bar, measured(ms, bytes));
    }
    Ok(())
}
