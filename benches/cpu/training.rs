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

/// Each case step by step in turn with what it is compared with.
pub fn run(session: &Session) -> Result<()> {
    against_f32(session)?;
    scaled_against_delayed(session)
}

fn against_f32(session: &Session) -> Result<()> {
    let case = session.name("train_gpt step delayed");
    if !session.wants(&case) {
        return Ok(());
    }
    let [ours, plain] = race(session, &case, ["delayed", "f32"])?;
    let times = Times {
        ours: Some(ours),
        f32: Some(plain),
        ..Times::default()
    };
    session.report(
        case,
        (Metric::StepRatio, plain / ours),
        Some(1.4),
        times,
        None,
    )
}

fn scaled_against_delayed(session: &Session) -> Result<()> {
    let case = session.name("train_gpt step scaled_fp8");
    if !session.wants(&case) {
        return Ok(());
    }
    let [ours, delayed] = race(session, &case, ["scaled_fp8", "delayed"])?;
    let times = Times {
        ours: Some(ours),
        ..Times::default()
    };
    let value = (Metric::StepRatioDelayed, delayed / ours);
    session.report(case, value, Some(1. / 1.3), times, None)
}

/// Median milliseconds of a step of two runs that take turns.
fn race(session: &Session, case: &str, names: [&str; 2]) -> Result<[f64; 2]> {
    let settings = settings();
    let data = text(&settings)?;
    let mut runs = [
        Run::new(names[0], &settings, &Device::Cpu)?,
        Run::new(names[1], &settings, &Device::Cpu)?,
    ];
    let (warm_up, rounds) = if session.quick() { (2, 3) } else { (3, 15) };
    let mut ms = [vec![], vec![]];
    for round in 0..warm_up + rounds {
        let mut losses = [0.; 2];
        for ((run, ms), loss) in runs.iter_mut().zip(&mut ms).zip(&mut losses) {
            let step = train_step(run, &data)?;
            *loss = step.loss;
            if round >= warm_up {
                ms.push(step.ms);
            }
        }
        let [ours, other] = losses;
        ensure!(
            (ours / other - 1.).abs() < 0.05,
            "{case}: the loss is {ours} where {} has {other}",
            names[1]
        );
    }
    Ok(ms.map(|ms| median(ms.into_iter())))
}

fn train_step(run: &mut Run, data: &Data) -> Result<Step> {
    run.train_step(data)?;
    run.read_steps()?.pop().context("a step without results")
}
