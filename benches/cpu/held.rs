//! Bytes that a block of `examples/train_gpt` keeps from its forward to its backward pass, against torch's bf16 autocast.

use crate::rows::Metric;
use crate::run::Run;
use crate::session::{Session, Times};
use crate::training::{alone, sized, text};
use anyhow::Result;
use candle_core::{Device, Tensor};
use fp8::config::KeptActivations;
use fp8::fp8_autocast;
use fp8_test_support::memory::{self, Counting};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const HIDDEN: usize = 256;
const HEADS: usize = 4;
const CONTEXT: usize = 128;
const BATCH: usize = 8;

/// A row with the ratio and one with our bytes, for each recipe.
pub fn run(session: &Session) -> Result<()> {
    use KeptActivations::HighPrecision;
    for (recipe, recomputes, kept) in [
        ("f32", false, HighPrecision),
        ("tensorwise", false, HighPrecision),
        ("delayed", false, HighPrecision),
        ("delayed", true, HighPrecision),
        ("delayed", false, KeptActivations::fp8()),
        ("delayed", true, KeptActivations::fp8()),
    ] {
        // The bars are shares of torch's bytes: options that are there to save memory.
        let (how, bar) = match (recomputes, kept) {
            (true, HighPrecision) => (", recomputing", Some(1. / 0.55)),
            (false, HighPrecision) => ("", None),
            (true, _) => (", activations in FP8, recomputing", Some(1. / 0.35)),
            (false, _) => (", activations in FP8", Some(1. / 0.55)),
        };
        let case = session.name(format!("block kept for backward, {recipe}{how}"));
        if !session.wants(&case) {
            continue;
        }
        let ours = bytes_per_token(recipe, recomputes, kept)?;
        let ratio = torch_bytes_per_token() / ours;
        let times = Times::default();
        session.report(case.clone(), (Metric::KeptRatio, ratio), bar, times, None)?;
        session.report(case, (Metric::BytesPerToken, ours), None, times, None)?;
    }
    Ok(())
}

/// The bytes that a second block adds, without those that do not grow with the batch: weights and their codes.
fn bytes_per_token(recipe: &str, recomputes: bool, kept: KeptActivations) -> Result<f64> {
    let held = |layers, batch| held((recipe, recomputes, kept), layers, batch);
    let two = held(2, 2 * BATCH)? - held(2, BATCH)?;
    let one = held(1, 2 * BATCH)? - held(1, BATCH)?;
    Ok((two - one) as f64 / (BATCH * CONTEXT) as f64)
}

/// The bytes that a forward pass leaves allocated for the backward pass.
fn held(
    (recipe, recomputes, kept): (&str, bool, KeptActivations),
    layers: usize,
    batch: usize,
) -> Result<isize> {
    let mut settings = sized(HIDDEN, layers, HEADS, CONTEXT, batch);
    settings.kept = kept;
    let data = text(&settings)?;
    let mut run = Run::new(recipe, &settings, &Device::Cpu, &alone()?)?;
    run.model.set_recomputation(recomputes);
    let (inputs, _) = data.train_batch(0, 0, batch, CONTEXT)?;
    let forward = || -> Result<Tensor> {
        let guard = run.recipe.clone().map(fp8_autocast).transpose()?;
        let logits = run.model.forward(&inputs)?;
        if let Some(guard) = guard {
            guard.close()?;
        }
        Ok(logits)
    };
    // The first step allocates buffers that later ones reuse.
    forward()?.sum_all()?.backward()?;
    let before = memory::held();
    let logits = forward()?;
    let after = memory::held();
    drop(logits);
    Ok(after - before)
}

/// What `tools/torch_gpt.py --kept` measures with torch 2.15, to the byte:
///
/// | bytes of a token | tensor |
/// |---|---|
/// | 4 hidden | the block's input in f32, which the first norm needs |
/// | 6 hidden | that norm's result, cast to bf16 for each of query, key and value: autocast keeps casts of parameters only |
/// | 6 hidden | q, k (rotated) and v in bf16 |
/// | 4 hidden | attention's result in bf16, heads first and tokens first |
/// | 4 hidden | the sum in f32, which the second norm needs |
/// | 2 hidden | that norm's result in bf16 |
/// | 16 hidden | result and activation of the MLP's first layer, 4 hidden features in bf16 each |
/// | 16 | mean and deviation of each norm in f32 |
/// | 4 heads | attention's log-sum-exps in f32 |
fn torch_bytes_per_token() -> f64 {
    ((4 + 6 + 6 + 4 + 4 + 2 + 16) * HIDDEN + 16 + 4 * HEADS) as f64
}
