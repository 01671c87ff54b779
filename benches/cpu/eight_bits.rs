//! Steps of `examples/train_gpt` with moments, kept activations and attention in FP8, against the recipe `delayed` without them.

use crate::gpt::Activations;
use crate::gpt::attention::Operands;
use crate::rows::Metric;
use crate::run::Run;
use crate::session::{Session, Times};
use crate::settings::{Moments, Settings};
use crate::spread::median;
use crate::training::{LARGER, alone, sized, text, train_step};
use anyhow::{Result, ensure};
use candle_core::Device;
use fp8::config::KeptActivations;

/// An option of a run.
type Change = fn(&mut Settings);

const MOMENTS: (&str, Change) = ("FP8 moments", |settings| {
    settings.moments = Moments::Fp8.into();
});
const NEAREST: (&str, Change) = ("nearest FP8 moments", |settings| {
    settings.moments = Moments::Fp8Nearest.into();
});
const KEPT: (&str, Change) = ("activations in FP8", |settings| {
    settings.kept = KeptActivations::fp8();
});
const ATTENTION: (&str, Change) = ("FP8 attention", |settings| {
    settings.model.attention = Some(Operands::Fp8);
});
const ALL: (&str, Change) = ("all in FP8", |settings| {
    for (_, change) in [MOMENTS, KEPT, ATTENTION] {
        change(settings);
    }
});

/// An option may cost 3% of a step.
const OPTION: Option<f64> = Some(1. / 1.03);

/// The options one by one, and all together against `delayed` with activations in f32.
pub fn run(session: &Session) -> Result<()> {
    let (name, hidden, layers, heads) = LARGER[0];
    let small = Settings::default();
    let large = sized(hidden, layers, heads, 256, 8);
    let case = "train_gpt step delayed";
    options(session, case, &small, &[KEPT])?;
    let case = format!("{case}, {name}");
    options(session, &case, &large, &[MOMENTS, NEAREST, KEPT])?;
    let mut in_bf16 = large.clone();
    in_bf16.model.activations = Activations::Bf16;
    let case = format!("{case}, bf16");
    options(session, &case, &in_bf16, &[MOMENTS, KEPT, ATTENTION])?;
    let mut all = in_bf16;
    ALL.1(&mut all);
    let case = session.name(format!("{case}, {}", ALL.0));
    contest(session, &large, &[(case, all, Some(1.))])
}

/// `plain` with each option whose case the filter lets through, against `plain`.
fn options(
    session: &Session,
    case: &str,
    plain: &Settings,
    changes: &[(&str, Change)],
) -> Result<()> {
    let contestants: Vec<_> = changes
        .iter()
        .map(|(name, change)| {
            let mut settings = plain.clone();
            change(&mut settings);
            (session.name(format!("{case}, {name}")), settings, OPTION)
        })
        .collect();
    contest(session, plain, &contestants)
}

/// Reports how long a step of `plain` takes over one of each contestant whose case the filter lets through. They take turns, and the
/// figure is the median of that of each round, so that a machine whose speed changes slowly does not change it. A turn has one more step
/// than is timed: the first finds other runs' tensors in the caches.
fn contest(
    session: &Session,
    plain: &Settings,
    contestants: &[(String, Settings, Option<f64>)],
) -> Result<()> {
    let wants = |case: &str| match plain.model.hidden_size > 256 {
        true => session.wants_large(case),
        false => session.wants(case),
    };
    let wanted: Vec<_> = (contestants.iter())
        .filter(|(case, ..)| wants(case))
        .collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let data = text(plain)?;
    let settings = [plain].into_iter().chain(wanted.iter().map(|(_, s, _)| s));
    let runs = settings.map(|settings| Run::new("delayed", settings, &Device::Cpu, &alone()?));
    let mut runs = runs.collect::<Result<Vec<_>>>()?;
    let rounds = if session.quick() { 3 } else { 15 };
    // Milliseconds of each round, for each run.
    let mut ms = vec![vec![]; runs.len()];
    let mut losses = vec![0.; runs.len()];
    for round in 0..=rounds {
        for ((run, ms), loss) in runs.iter_mut().zip(&mut ms).zip(&mut losses) {
            train_step(run, &data)?;
            let timed = [train_step(run, &data)?, train_step(run, &data)?];
            *loss = timed[1].loss;
            if round > 0 {
                ms.push(timed.iter().map(|step| step.ms).sum::<f64>() / timed.len() as f64);
            }
        }
    }
    // The first steps say nothing: losses go up before they go down, and the least difference moves that.
    for ((case, ..), loss) in wanted.iter().zip(&losses[1..]) {
        ensure!(
            session.quick() || (loss / losses[0] - 1.).abs() < 0.15,
            "{case}: the loss is {loss} where `delayed` alone has {}",
            losses[0]
        );
    }
    for ((case, _, bar), ours) in wanted.into_iter().zip(&ms[1..]) {
        let ratios = ms[0].iter().zip(ours).map(|(plain, ours)| plain / ours);
        let value = (Metric::StepRatioDelayed, median(ratios));
        let times = Times {
            ours: Some(median(ours.iter().copied())),
            ..Times::default()
        };
        session.report(case.clone(), value, *bar, times, None)?;
    }
    Ok(())
}
