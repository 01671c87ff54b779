//! Steps of `examples/train_gpt` with its defaults and of larger models, delayed FP8 against f32.

use crate::data::Data;
use crate::ranks::{Ranks, Travel};
use crate::rows::Metric;
use crate::run::Run;
use crate::session::{Session, Times};
use crate::settings::Settings;
use crate::spread::median;
use anyhow::{Context, Result, ensure};
use candle_core::Device;
use fp8::ranks::ProcessGroup;
use fp8::training::StepRecord;
use std::path::Path;

/// Some text; its content does not affect the time of a step.
pub fn text(settings: &Settings) -> Result<Data> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("fp8-recipes/src");
    let model = &settings.model;
    Data::load(
        Some(&sources),
        model.vocab_size,
        settings.batch,
        model.context,
    )
}

/// Runs each case and its counterpart in turn, step by step.
pub fn run(session: &Session) -> Result<()> {
    against_f32(
        session,
        "train_gpt step delayed",
        &Settings::default(),
        Some(1.4),
    )?;
    for (name, hidden, layers, heads) in LARGER {
        let case = format!("train_gpt step delayed, {name}");
        if session.wants_large(&session.name(&case)) {
            let settings = sized(hidden, layers, heads, 256, 8);
            against_f32(session, &case, &settings, None)?;
        }
    }
    scaled_against_delayed(session)
}

/// With a context of 256: parameters, hidden size, layers, heads. The last is GPT-2 small with a vocabulary of 256 tokens, as
/// everywhere in this file, instead of 50257, which have 39M parameters.
pub const LARGER: [(&str, usize, usize, usize); 2] = [
    ("25M", 512, 8, 8),
    ("85M (GPT-2 small, bytes)", 768, 12, 12),
];

/// The defaults for a model of other sizes.
pub fn sized(hidden: usize, layers: usize, heads: usize, context: usize, batch: usize) -> Settings {
    let mut settings = Settings {
        batch,
        ..Settings::default()
    };
    let model = &mut settings.model;
    (model.hidden_size, model.num_layers) = (hidden, layers);
    (model.num_heads, model.context) = (heads, context);
    settings
}

fn against_f32(session: &Session, case: &str, settings: &Settings, bar: Option<f64>) -> Result<()> {
    let case = session.name(case);
    if !session.wants(&case) {
        return Ok(());
    }
    let [ours, plain] = race(session, &case, [("delayed", settings), ("f32", settings)])?;
    let times = Times {
        ours: Some(ours),
        f32: Some(plain),
        ..Times::default()
    };
    session.report(case, (Metric::StepRatio, plain / ours), bar, times, None)
}

fn scaled_against_delayed(session: &Session) -> Result<()> {
    let case = session.name("train_gpt step scaled_fp8");
    if !session.wants(&case) {
        return Ok(());
    }
    let settings = &Settings::default();
    let [ours, delayed] = race(
        session,
        &case,
        [("scaled_fp8", settings), ("delayed", settings)],
    )?;
    let times = Times {
        ours: Some(ours),
        ..Times::default()
    };
    let value = (Metric::StepRatioDelayed, delayed / ours);
    session.report(case, value, Some(1. / 1.3), times, None)
}

/// Median milliseconds of a step of two runs that take turns.
fn race(session: &Session, case: &str, of: [(&str, &Settings); 2]) -> Result<[f64; 2]> {
    let (names, settings) = (of.map(|(name, _)| name), of[0].1);
    let data = text(settings)?;
    let run = |(name, settings)| Run::new(name, settings, &Device::Cpu, &alone()?);
    let mut runs = [run(of[0])?, run(of[1])?];
    let large = settings.model.hidden_size > 256;
    let (warm_up, rounds) = match (session.quick(), large) {
        (true, _) => (2, 3),
        (false, true) => (2, 7),
        (false, false) => (3, 15),
    };
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
        // The first steps of AdamW move every parameter by the whole learning rate, so roundings show.
        ensure!(
            (ours / other - 1.).abs() < 0.15,
            "{case}: the loss is {ours} where {} has {other}",
            names[1]
        );
    }
    Ok(ms.map(median))
}

/// A process that trains alone.
pub fn alone() -> Result<Ranks> {
    Ranks::new(&ProcessGroup::single(), None, Travel::default())
}

/// One step, with its results.
pub fn train_step(run: &mut Run, data: &Data) -> Result<StepRecord> {
    run.train_step(data)?;
    run.read_steps()?.pop().context("a step without results")
}
