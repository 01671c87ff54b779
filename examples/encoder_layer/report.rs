//! What the program prints.

use crate::args::{RunName, Steps};
use crate::layer::LayerConfig;
use crate::layer::attention::Operands;
use crate::race::Outcome;
use crate::spread::Spread;
use anyhow::{Result, bail};
use fp8::fp8_core::Isa;
use serde_json::{Value, json};

/// Mean times in ms that fp8layers' README publishes for its example, for a layer of 4096 features on an H100: f32, mixed (f16 there), and
/// FP8 beside mixed.
const PUBLISHED_MS: [f64; 3] = [84., 45., 35.];

/// What was run.
pub struct Setup {
    pub config: LayerConfig,
    pub steps: Steps,
    pub is_cuda: bool,
    pub tf32: bool,
}

impl Setup {
    fn place(&self) -> String {
        if self.is_cuda {
            return "cuda".into();
        }
        let threads = rayon::current_num_threads();
        let isa = Isa::best().level().name();
        format!("cpu ({threads} threads, {isa})")
    }

    /// The report as text.
    pub fn print(&self, outcomes: &[Outcome]) -> Result<()> {
        let LayerConfig {
            hidden,
            sequence,
            batch,
            ffn,
            heads,
            causal,
            ..
        } = self.config;
        let Steps { timed, warmup } = self.steps;
        println!(
            "GPT encoder layer on {}: {hidden} features, {ffn} in the MLP, {heads} heads{}, {batch} sequences of {sequence} tokens",
            self.place(),
            if causal { ", causal" } else { "" },
        );
        println!(
            "Forward and backward, {timed} iterations of each in turn after {warmup} others\n"
        );
        for outcome in outcomes {
            let Spread { median, min, max } = Spread::of(outcome.times.clone())?;
            println!(
                "{:<52} Mean time: {:.1} ms (median {median:.1}, {min:.1} to {max:.1}; {:.3} TFLOP/s)",
                label(outcome),
                outcome.mean_ms(),
                self.config.flop() / outcome.mean_ms() * 1e-9,
            );
        }
        println!();
        for (slower, ratio, published) in ratios(outcomes) {
            println!(
                "FP8 is {ratio:.2} times as fast as {slower} here; fp8layers publishes {published:.2} for 4096 features on an H100"
            );
        }
        for outcome in outcomes {
            if let Some((apart, expected)) = &outcome.apart {
                println!(
                    "Of {}, the output differs from f32's by {:.2}% (up to {:.1}% by its dtypes), the gradients by {:.2}% (up to {:.1}%)",
                    outcome.name.as_str(),
                    100. * apart.output,
                    100. * expected.output,
                    100. * apart.gradients,
                    100. * expected.gradients,
                );
            }
        }
        Ok(())
    }

    /// The report as one JSON object.
    pub fn json(&self, outcomes: &[Outcome]) -> Result<Value> {
        let runs = outcomes.iter().map(|outcome| self.run(outcome));
        let ratios = ratios(outcomes).into_iter().map(|(slower, ratio, published)| {
            json!({ "against": slower, "ratio": ratio, "published_on_h100": published })
        });
        Ok(json!({
            "device": if self.is_cuda { "cuda" } else { "cpu" },
            "hidden": self.config.hidden,
            "sequence": self.config.sequence,
            "batch": self.config.batch,
            "ffn": self.config.ffn,
            "heads": self.config.heads,
            "causal": self.config.causal,
            "tf32": self.tf32,
            "iterations": self.steps.timed,
            "warmup": self.steps.warmup,
            "runs": runs.collect::<Result<Vec<_>>>()?,
            "fp8_ratios": ratios.collect::<Vec<_>>(),
        }))
    }

    fn run(&self, outcome: &Outcome) -> Result<Value> {
        let Spread { median, min, max } = Spread::of(outcome.times.clone())?;
        let mean = outcome.mean_ms();
        let recipe = outcome.precision.recipe;
        let apart = outcome.apart.map(|(apart, expected)| {
            json!({
                "output": apart.output,
                "gradients": apart.gradients,
                "expected_output": expected.output,
                "expected_gradients": expected.gradients,
            })
        });
        Ok(json!({
            "name": outcome.name.as_str(),
            "parameters": outcome.precision.parameters.as_str(),
            "activations": outcome.precision.activations.as_str(),
            "fp8": recipe.map_or("off", |recipe| recipe.as_str()),
            "attention": self.config.attention.unwrap_or(Operands::of_run(recipe.is_some())),
            "mean_ms": mean,
            "ms": median,
            "min_ms": min,
            "max_ms": max,
            "tokens_per_s": self.config.tokens() as f64 / mean * 1e3,
            "tflop_per_s": self.config.flop() / mean * 1e-9,
            "apart_from_f32": apart,
        }))
    }
}

/// A run in words.
fn label(outcome: &Outcome) -> String {
    let activations = outcome.precision.activations.as_str();
    match (outcome.name, outcome.precision.recipe) {
        (RunName::Fp8, Some(recipe)) => {
            format!("fp8 ({recipe}): f32 parameters, {activations} activations")
        }
        (RunName::Mixed, _) => {
            format!("mixed: f32 parameters, {activations} activations")
        }
        _ => "f32".into(),
    }
}

/// How many times as fast FP8 is as the other runs, by mean times, here and as published.
fn ratios(outcomes: &[Outcome]) -> Vec<(&'static str, f64, f64)> {
    let Some(fp8) = outcomes.iter().find(|run| run.name == RunName::Fp8) else {
        return vec![];
    };
    let [f32_ms, mixed_ms, fp8_ms] = PUBLISHED_MS;
    let published = [(RunName::F32, f32_ms), (RunName::Mixed, mixed_ms)];
    let others = published.into_iter().filter_map(|(name, ms)| {
        let other = outcomes.iter().find(|run| run.name == name)?;
        let ratio = other.mean_ms() / fp8.mean_ms();
        Some((name.as_str(), ratio, ms / fp8_ms))
    });
    others.collect()
}

/// Fails if the results of a run are farther from f32's than its dtypes explain; otherwise says how many agree.
pub fn verdict(outcomes: &[Outcome]) -> Result<usize> {
    let mut agreeing = 0;
    for outcome in outcomes {
        let Some((apart, expected)) = &outcome.apart else {
            continue;
        };
        if !apart.is_within(expected) {
            bail!(
                "the results of {} are {apart:?} from those of f32 (shares of the norms), expected at most {expected:?}",
                outcome.name.as_str()
            );
        }
        agreeing += 1;
    }
    Ok(agreeing)
}
