//! Steps of `examples/train_gpt` as the context grows, and as the model grows wider: tokens per second of the recipe `delayed`.

use crate::rows::Metric;
use crate::run::Run;
use crate::session::{Session, Times};
use crate::settings::Settings;
use crate::spread::median;
use crate::training::{alone, sized, text, train_step};
use anyhow::Result;
use candle_core::Device;

/// Tokens of a step for every context, so that times of steps compare as times of tokens do.
const TOKENS: usize = 2048;
const CONTEXTS: [usize; 5] = [128, 256, 512, 1024, 2048];
const WIDTHS: [usize; 4] = [128, 256, 512, 1024];
/// Features of a head at every width.
const HEAD: usize = 64;

/// Both series; with `--quick` only the cases that `--filter` names.
pub fn run(session: &Session) -> Result<()> {
    for context in CONTEXTS {
        let case = format!("train_gpt tokens delayed, context {context}");
        let settings = sized(256, 4, 4, context, TOKENS / context);
        tokens(session, &case, &settings)?;
    }
    for hidden in WIDTHS {
        let case = format!("train_gpt tokens delayed, hidden {hidden}");
        let settings = sized(hidden, 4, hidden / HEAD, 128, 8);
        tokens(session, &case, &settings)?;
    }
    Ok(())
}

fn tokens(session: &Session, case: &str, settings: &Settings) -> Result<()> {
    let case = session.name(case);
    if !session.wants_large(&case) {
        return Ok(());
    }
    let data = text(settings)?;
    let mut run = Run::new("delayed", settings, &Device::Cpu, &alone()?)?;
    let (warm_up, rounds) = if session.quick() { (1, 3) } else { (2, 9) };
    let mut ms = vec![];
    for round in 0..warm_up + rounds {
        let step = train_step(&mut run, &data)?;
        if round >= warm_up {
            ms.push(step.ms);
        }
    }
    let ours = median(ms);
    let times = Times {
        ours: Some(ours),
        ..Times::default()
    };
    let per_s = (settings.batch * settings.model.context) as f64 / ours * 1e3;
    session.report(case, (Metric::TokensPerS, per_s), None, times, None)
}
