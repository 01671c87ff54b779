//! `examples/generate`: the saved FP8 model against the same model in f32.

use crate::gpt::Gpt;
use crate::inputs::check;
use crate::rows::Metric;
use crate::run::Run;
use crate::session::{Session, Times};
use crate::settings::Settings;
use crate::spread::median;
use crate::training::alone;
use crate::training::text;
use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use fp8::{atomic, load, save_calibrated};
use std::path::Path;
use std::time::Instant;

/// Both models write the same number of bytes in turn, from the example's default prompt.
pub fn run(session: &Session) -> Result<()> {
    let case = session.name("generate fp8");
    if !session.wants(&case) {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let (ours, plain) = models(folder.path())?;

    let prompt = b"fn main";
    let tokens: Vec<u32> = prompt.iter().map(|&byte| byte.into()).collect();
    let prompt = tokens.clone();
    let tokens = Tensor::from_vec(tokens, (1, prompt.len()), &Device::Cpu)?;
    check(
        &case,
        &ours.forward(&tokens)?,
        &plain.forward(&tokens)?,
        0.15,
    )?;

    let (count, rounds) = if session.quick() { (50, 3) } else { (200, 7) };
    // Milliseconds per byte.
    let time = |model: &Gpt| -> Result<f64> {
        let began = Instant::now();
        let text = model.generate(&prompt, count, 0.8, 0, |_| ())?;
        let ms = began.elapsed().as_secs_f64() * 1e3;
        ensure!(text.len() == count, "{case}: {} bytes", text.len());
        Ok(ms / count as f64)
    };
    let (mut ours_ms, mut plain_ms) = (vec![], vec![]);
    for round in 0..=rounds {
        let (ours, plain) = (time(&ours)?, time(&plain)?);
        if round > 0 {
            ours_ms.push(ours);
            plain_ms.push(plain);
        }
    }
    let times = Times {
        ours: Some(median(ours_ms)),
        f32: Some(median(plain_ms)),
        ..Times::default()
    };
    let ratio = times.f32.unwrap_or(f64::NAN) / times.ours.unwrap_or(f64::NAN);
    session.report(case, (Metric::TokensRatio, ratio), Some(2.5), times, None)
}

/// The example's model with random weights, loaded from its calibrated FP8 file and from an f32 one.
fn models(folder: &Path) -> Result<(Gpt, Gpt)> {
    let settings = Settings::default();
    let run = Run::new("delayed", &settings, &Device::Cpu, &alone()?)?;
    run.calibrate(&text(&settings)?, 2)?;
    let fp8 = save_calibrated(&run.model, folder.join("fp8.safetensors"))?.model;

    let f32 = folder.join("f32.safetensors");
    atomic::write_safetensors_atomic(&f32, &run.weights.tensors()?, None)?;

    let load = |file: &Path| -> Result<Gpt> {
        let vb = load::var_builder(&[file], DType::F32, &Device::Cpu)?;
        Gpt::new(&settings.model, vb)
    };
    Ok((load(&fp8)?, load(&f32)?))
}
