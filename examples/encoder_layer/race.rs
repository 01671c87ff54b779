//! The runs take turns, step by step, with the same parameters.

use crate::args::{RunName, Steps};
use crate::clock::{Clock, Mark};
use crate::compare::Apart;
use crate::layer::{Inputs, LayerConfig, LayerStep, Pass, Precision};
use anyhow::{Context, Result};
use candle_core::Device;
use candle_nn::VarMap;

/// What one run took, and how far its results are from those of f32.
pub struct Outcome {
    pub name: RunName,
    pub precision: Precision,
    /// Milliseconds of forward and backward of each timed step.
    pub times: Vec<f64>,
    /// The difference from f32 in the last step and the largest expected one; none for f32 itself, or without it.
    pub apart: Option<(Apart, Apart)>,
}

struct Contestant {
    name: RunName,
    precision: Precision,
    step: LayerStep,
    marks: Vec<(Mark, Mark)>,
}

/// Times forward and backward of every run. After each turn of all, an optimizer step with the gradients of the first run changes the
/// parameters that they share, so that every step casts them anew, as in training.
pub fn race(
    config: LayerConfig,
    runs: &[(RunName, Precision)],
    steps: Steps,
    device: &Device,
) -> Result<Vec<Outcome>> {
    let (vars, inputs) = (VarMap::new(), Inputs::random(config, device)?);
    let mut contestants = runs
        .iter()
        .map(|&(name, precision)| {
            let step = LayerStep::with(config, precision, &vars, &inputs)?;
            Ok(Contestant {
                name,
                precision,
                step,
                marks: vec![],
            })
        })
        .collect::<Result<Vec<_>>>()?;
    let first = contestants.first().context("no runs")?;
    let mut optimizer = first.step.optimizer()?;
    // Times are read at the end: on CUDA the host runs ahead, as in training.
    let clock = Clock::new(device);
    let rounds = steps.warmup + steps.timed;
    let mut last = vec![];
    for round in 0..rounds {
        let mut passes = vec![];
        for contestant in &mut contestants {
            let begin = clock.mark()?;
            let pass = contestant.step.pass()?;
            let end = clock.mark()?;
            if round >= steps.warmup {
                contestant.marks.push((begin, end));
            }
            // The first run's gradients are for the optimizer; at the end, all results are compared.
            if passes.is_empty() || round + 1 == rounds {
                passes.push(pass);
            }
        }
        match round + 1 == rounds {
            true => last = passes,
            false => drop(optimizer.apply(&passes[0].grads)?),
        }
    }
    outcomes(contestants, &last)
}

fn outcomes(contestants: Vec<Contestant>, last: &[Pass]) -> Result<Vec<Outcome>> {
    let passes: Vec<_> = contestants.iter().zip(last).collect();
    let reference = passes.iter().find(|(run, _)| run.name == RunName::F32);
    passes
        .iter()
        .map(|(run, pass)| {
            run.step.check(&pass.grads)?;
            let times = run.marks.iter().map(|(begin, end)| begin.ms_until(end));
            let apart = match reference {
                Some((f32_run, f32_pass)) if run.name != RunName::F32 => {
                    let apart = Apart::between((&f32_run.step, f32_pass), (&run.step, pass))?;
                    Some((apart, Apart::expected(run.precision)?))
                }
                _ => None,
            };
            Ok(Outcome {
                name: run.name,
                precision: run.precision,
                times: times.collect::<Result<_>>()?,
                apart,
            })
        })
        .collect()
}

impl Outcome {
    /// Mean of the times in ms, as the published example prints it.
    pub fn mean_ms(&self) -> f64 {
        self.times.iter().sum::<f64>() / self.times.len() as f64
    }
}
