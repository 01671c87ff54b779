//! Casts to and from E4M3 over slices, on one thread.

use crate::inputs::normal;
use crate::rows::{Metric, Work};
use crate::session::{Field, Session};
use crate::timing::Contestant;
use anyhow::{Result, ensure};
use candle_core::{DType, Device, Storage, Tensor, WithDType};
use fp8::fp8_core::{
    Cast, Format, HighPrecision, Isa, amax, decode, dynamic_quant_scale, encode_with_amax,
    reciprocal,
};
use half::bf16;
use std::hint::black_box;

/// Bytes of an input that stays in the second-level cache.
const SMALL: usize = 256 << 10;

/// Values that fit in the first-level cache together with their codes.
const SMALLEST: usize = 16 << 10;
/// Calls in a run of a case in cache.
const CALLS: usize = 100;

/// Runs with one thread only: one thread casts a slice.
pub fn run(session: &Session) -> Result<()> {
    if session.threads > 1 {
        return Ok(());
    }
    // AVX2 rounds with vectors of half the length.
    let (in_cache, from_memory) = match Isa::best().level().name() {
        "avx2" => (14., 10.),
        _ => (24., 14.),
    };
    encoding::<f32>(session, "f32", SMALL, Some(in_cache))?;
    encoding::<bf16>(session, "bf16", SMALL, None)?;
    let large = if session.quick() { 256 << 20 } else { 1 << 30 };
    encoding::<f32>(session, "f32", large, Some(from_memory))?;
    encoding::<bf16>(session, "bf16", large, None)?;
    decoding(session, SMALLEST, Some(12.))?;
    decoding(session, SMALL, None)
}

/// Casts with a scale, and the amax from the same pass.
fn encoding<T: WithDType + HighPrecision>(
    session: &Session,
    name: &str,
    bytes: usize,
    bar: Option<f64>,
) -> Result<()> {
    let (size, in_cache) = (label(bytes), bytes == SMALL);
    let place = if in_cache { "in cache" } else { "from memory" };
    let case = session.name(format!("cast {name}->e4m3 with amax, {size} {place}"));
    if !session.wants(&case) {
        return Ok(());
    }
    let tensor = repeated::<T>(bytes / T::DTYPE.size_in_bytes())?;
    let (storage, _) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        anyhow::bail!("not a tensor on the host");
    };
    let src = storage.as_slice::<T>()?;
    let mut codes = vec![1u8; src.len()];
    let cast = Cast::new(Format::E4M3);
    let quant_scale = dynamic_quant_scale(amax(src), Format::E4M3);

    let largest = encode_with_amax(&cast, src, quant_scale, &mut codes);
    ensure!(
        largest == src.iter().fold(0f64, |a, x| a.max(x.to_f64().abs())) as f32,
        "{case}: wrong amax"
    );
    check_codes(&case, src, &codes, quant_scale)?;

    let calls = if in_cache { CALLS } else { 1 };
    let run = || {
        for _ in 0..calls {
            black_box(encode_with_amax(
                &cast,
                black_box(src),
                quant_scale,
                &mut codes,
            ));
        }
        Ok(())
    };
    let candle = || {
        black_box(tensor.to_dtype(DType::F8E4M3)?);
        Ok(())
    };
    // It has neither scale nor amax; large inputs take it seconds.
    let mut candle = in_cache.then(|| Contestant::new(candle).optional());
    let is_f32 = T::DTYPE == DType::F32;
    let times = session.time(Field {
        ours: Contestant::new(run).with_calls(calls),
        f32: candle.take_if(|_| is_f32),
        bf16: candle.take_if(|_| !is_f32),
        q8_0: None,
    })?;
    let rate = bytes as f64 / times.ours.unwrap_or(f64::NAN) * 1e-6;
    let work = (!in_cache).then_some(Work::Read(bytes as f64));
    session.report(case, (Metric::GbPerS, rate), bar, times, work)
}

fn decoding(session: &Session, bytes: usize, bar: Option<f64>) -> Result<()> {
    let len = bytes / 4;
    let case = session.name(format!(
        "decode e4m3->f32, {} of f32 in cache",
        label(bytes)
    ));
    if !session.wants(&case) {
        return Ok(());
    }
    let src: Vec<f32> = normal(1, len)?.to_vec1()?;
    let quant_scale = dynamic_quant_scale(amax(&src), Format::E4M3);
    let mut codes = vec![0u8; len];
    encode_with_amax(&Cast::new(Format::E4M3), &src, quant_scale, &mut codes);
    check_codes(&case, &src, &codes, quant_scale)?;
    let dequant_scale = reciprocal(quant_scale);
    let mut values = vec![0f32; len];
    let run = || {
        for _ in 0..CALLS {
            decode(Format::E4M3, black_box(&codes), dequant_scale, &mut values);
            black_box(&mut values);
        }
        Ok(())
    };
    let times = session.time(Field {
        ours: Contestant::new(run).with_calls(CALLS),
        f32: None,
        bf16: None,
        q8_0: None,
    })?;
    let rate = len as f64 / times.ours.unwrap_or(f64::NAN) * 1e-6;
    session.report(case, (Metric::GelemPerS, rate), bar, times, None)
}

/// Checks that every code of a normal value is within half a step of it.
fn check_codes<T: WithDType>(case: &str, src: &[T], codes: &[u8], quant_scale: f32) -> Result<()> {
    let (head, tail) = (
        codes.len().min(1 << 16),
        codes.len().saturating_sub(1 << 16),
    );
    for range in [0..head, tail..codes.len()] {
        let mut values = vec![0f32; range.len()];
        decode(
            Format::E4M3,
            &codes[range.clone()],
            reciprocal(quant_scale),
            &mut values,
        );
        for (x, value) in src[range].iter().zip(values) {
            let x = x.to_f64();
            let step = (x.abs() / 16.).max(0.5f64.powi(10) / f64::from(quant_scale));
            ensure!(
                (x - f64::from(value)).abs() <= 1.0001 * step,
                "{case}: {x} became {value}"
            );
        }
    }
    Ok(())
}

/// A block of normal values, repeated.
fn repeated<T: WithDType>(len: usize) -> Result<Tensor> {
    let block: Vec<T> = normal(1, len.min(1 << 20))?.to_dtype(T::DTYPE)?.to_vec1()?;
    let values: Vec<T> = block.iter().copied().cycle().take(len).collect();
    Ok(Tensor::from_vec(values, len, &Device::Cpu)?)
}

fn label(bytes: usize) -> String {
    match bytes {
        1_073_741_824.. => format!("{} GiB", bytes >> 30),
        1_048_576.. => format!("{} MiB", bytes >> 20),
        _ => format!("{} KiB", bytes >> 10),
    }
}
