//! The product of two FP8 matrices.

use crate::inputs::{check, normal};
use crate::rows::{Bars, Work};
use crate::session::{Field, Session};
use crate::timing::Contestant;
use anyhow::Result;
use candle_core::{DType, Device, Storage, Tensor};
use fp8::fp8_candle::device::{Backend, GemmOutput, backend};
use fp8::fp8_candle::{Fp8Tensor, Quantizer};
use fp8::fp8_core::{Contraction, Format, Granularity};
use std::hint::black_box;

/// Cubes, E4M3 times E4M3.
pub fn run(session: &Session) -> Result<()> {
    for size in [512, 1024, 2048] {
        let case = session.name(format!("gemm {size}x{size}x{size}"));
        if session.wants(&case) {
            cube(session, case, size)?;
        }
    }
    Ok(())
}

/// The bar of a compute-bound product: `default` with bf16 units, a lower one with f32 units.
pub fn bar(session: &Session, default: f64) -> f64 {
    match session.has_f32_units() {
        true => 0.95,
        false => default,
    }
}

fn cube(session: &Session, case: String, size: usize) -> Result<()> {
    let quantizer = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise);
    let fp8 = |seed| -> Result<Fp8Tensor> {
        let x = normal(seed, (size, size))?;
        Ok(Fp8Tensor::quantize(&x, &quantizer, Contraction::Cols)?)
    };
    let (a8, b8) = (fp8(1)?, fp8(2)?);
    let (a, b) = (a8.dequantize(DType::F32)?, b8.dequantize(DType::F32)?.t()?);
    let (a16, b16) = (
        a8.dequantize(DType::BF16)?,
        b8.dequantize(DType::BF16)?.t()?,
    );
    let backend = backend(&Device::Cpu)?;

    let ours = values(multiply(backend, &a8, &b8)?, (size, size))?;
    check(&case, &ours, &a.matmul(&b)?, 1e-5)?;

    let flop = 2. * (size as f64).powi(3);
    let wants_bf16 = session.forced.is_none();
    let work = Work::Flop(flop);
    let field = Field {
        ours: Contestant::new(|| {
            black_box(multiply(backend, &a8, &b8)?);
            Ok(())
        }),
        f32: Some(Contestant::new(|| {
            black_box(a.matmul(&b)?);
            Ok(())
        })),
        bf16: wants_bf16.then(|| {
            let run = || {
                black_box(a16.matmul(&b16)?);
                Ok(())
            };
            Contestant::new(run).optional()
        }),
        q8_0: None,
    };
    let times = session.time_beside(field, session.multiply_adds(flop))?;
    let one = session.threads == 1;
    let bars = match session.has_f32_units() {
        // Two threads should be 1.8 times as fast as one.
        true => Bars {
            peak: Some(if one { 0.9 } else { 0.9 * 0.9 }),
            ..Bars::default()
        },
        false => Some(if one { 2. } else { 1.9 }).into(),
    };
    session.report_ratio(case, bars, times, work)
}

fn multiply(backend: &dyn Backend, a: &Fp8Tensor, b: &Fp8Tensor) -> Result<Storage> {
    let out = GemmOutput {
        dtype: DType::F32,
        bias: None,
        use_fast_accum: false,
    };
    Ok(backend.gemm(
        &a.operand(Contraction::Cols),
        &b.operand(Contraction::Cols),
        &out,
    )?)
}

/// The f32 values of a result on the host.
fn values(storage: Storage, shape: (usize, usize)) -> Result<Tensor> {
    let Storage::Cpu(storage) = storage else {
        anyhow::bail!("the CPU backend gave a storage of another device");
    };
    let values = storage.as_slice::<f32>()?;
    Ok(Tensor::from_slice(values, shape, &Device::Cpu)?)
}
