//! Steps of `examples/train_gpt` with its defaults, delayed FP8 against f32.

use crate::data::Data;
use crate::gpt::GptConfig;
use crate::rows::Metric;
use crate::run::{Run, Settings, Step};
use crate::session::{Session, Times};
use crate::timing::median;
use anyhow::{Context, Result, ensure};
use candle_core::Device;
use std::path::Path;

/// The defaults of the example.
pub fn settings() -> Settings {
    Settings {
        recipes: vec!["f32".into(), "delayed".into()],
        steps: 200,
        seed: 0,
        batch: 8,
        learning_rate: 6e-4,
        model: GptConfig::default(),
        data: String::new(),
    }
}

/// Some text: which, does not matter to the time of a step.
pub fn text(settings: &Settings) -> Result<Data> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("fp8-recipes/src");
    Data::load(Some(&sources), settings.batch, settings.model.context)
}

/// Both runs step by step in turn.
pub fn run(session: &Session) -> Result<()> {
    let case = session.name("train_gpt step delayed");
    if !session.wants(&case) {
        return Ok(());
    }
    let settings = settings();
    let data = text(&settings)?;
    let mut ours = Run::new("delayed", &settings, &Device::Cpu)?;
    let mut plain = Run::new("f32", &settings, &Device::Cpu)?;
    let (warm_up, rounds) = if session.quick() { (2, 3) } else { (3, 15) };
    let (mut ours_ms, mut plain_ms) = (vec![], vec![]);
    for round in 0..warm_up + rounds {
        let (ours, plain) = (
            train_step(&mut ours, &data)?,
            train_step(&mut plain, &data)?,
        );
        let difference = (ours.loss / plain.loss - 1.).abs();
        ensure!(
            difference < 0.05,
            "{case}: the loss is {} where f32 has {}",
            ours.loss,
            plain.loss
        );
        if round >= warm_up {
            ours_ms.push(ours.ms);
            plain_ms.push(plain.ms);
        }
    }
    let times = Times {
        ours: Some(median(ours_ms.into_iter())),
        f32: Some(median(plain_ms.into_iter())),
        ..Times::default()
    };
    let ratio = times.f32.unwrap_or(f64::NAN) / times.ours.unwrap_or(f64::NAN);
    session.report(case, (Metric::StepRatio, ratio), Some(1.4), times, None)
}

fn train_step(run: &mut Run, data: &Data) -> Result<Step> {
    run.train_step(data)?;
    run.read_steps()?.pop().context("a step without results")
}
