//! `fp8 bench`: how fast a language model reads and writes on this machine, and which layers are faster in FP8.

use crate::layers;
use crate::model::{How, Source};
use crate::output::{print, print_json, size};
use crate::usage::at_least;
use anyhow::{Result, bail};
use candle_core::Tensor;
use fp8::models::{CausalLm, Llama};
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

/// Tokens of the prompt before decoding.
const PROMPT: usize = 16;

#[derive(clap::Args)]
pub struct Args {
    /// The model: a directory with safetensors files, or a GGUF file
    #[arg(required_unless_present = "shapes")]
    model: Option<PathBuf>,
    #[command(flatten)]
    how: How,
    #[command(flatten)]
    layers: layers::Options,
    /// Tokens of the prompt to read [default: 512, or the model's positions if it has fewer]
    #[arg(long, value_name = "N", conflicts_with = "layers", value_parser = at_least(1))]
    prefill: Option<usize>,
    /// Tokens to write, one by one, after a prompt of 16 [default: 64, or as many as the model has positions for]
    #[arg(long, value_name = "N", conflicts_with = "layers", value_parser = at_least(1))]
    decode: Option<usize>,
    /// How often to repeat each measurement; the fastest run counts
    #[arg(long, value_name = "N", default_value_t = 3, conflicts_with = "layers", value_parser = at_least(1))]
    repeats: usize,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<()> {
    if args.layers.layers {
        return layers::run(&args.layers, args.model, args.how, args.json);
    }
    let Some(model) = args.model else {
        bail!("a model is missing");
    };
    let how = args.how;
    let (model, linear) = Source { model, how }.load_llama()?;
    // A model without a limit gets one, so that absurdly long requests are an error.
    let positions = model.max_positions().unwrap_or(u32::MAX as usize);
    let reads = args.prefill.unwrap_or(512.min(positions));
    let room = positions.saturating_sub(PROMPT);
    let writes = args.decode.unwrap_or(64.min(room).max(1));
    for (flag, tokens, room) in [("--prefill", reads, positions), ("--decode", writes, room)] {
        if tokens > room {
            bail!("{flag} asks for {tokens} tokens, and the model has positions for {room}");
        }
    }
    let prefill = fastest(args.repeats, || prefill(&model, reads))?;
    let decode = fastest(args.repeats, || decode(&model, writes))?;
    let prefill = reads as f64 / prefill;
    let decode = writes as f64 / decode;
    let threads = rayon::current_num_threads();
    let of_f32 = linear.bytes as f64 / (4 * linear.elements).max(1) as f64;
    if args.json {
        return print_json(&json!({
            "prefill_tokens": reads,
            "prefill_tokens_per_second": prefill,
            "decode_tokens": writes,
            "decode_tokens_per_second": decode,
            "linear_weight_bytes": linear.bytes,
            "linear_weight_bytes_over_f32": of_f32,
            "threads": threads,
        }));
    }
    print(&format!(
        "prefill  {prefill:10.1} tokens/s ({} tokens)\ndecode   {decode:10.1} tokens/s ({} tokens)\n\
         linear weights {}, {of_f32:.3} of f32's\nthreads  {threads}\n",
        reads,
        writes,
        size(linear.bytes),
    ))
}

/// Seconds of the fastest run.
fn fastest(repeats: usize, mut run: impl FnMut() -> Result<f64>) -> Result<f64> {
    // A warm-up run fills caches and pools.
    run()?;
    let mut best = f64::INFINITY;
    for _ in 0..repeats {
        best = best.min(run()?);
    }
    Ok(best)
}

fn prompt(model: &Llama, tokens: usize) -> Result<Tensor> {
    let vocab_size = model.vocab_size();
    let ids: Vec<u32> = (0..tokens)
        .map(|i| (i * 7919 % vocab_size) as u32)
        .collect();
    Ok(Tensor::from_vec(ids, (1, tokens), model.device())?)
}

/// Seconds until the logits of the last token are computed.
fn prefill(model: &Llama, tokens: usize) -> Result<f64> {
    // The cache comes first: it reports missing memory.
    let mut cache = model.new_cache(1, tokens)?;
    let ids = prompt(model, tokens)?;
    let start = Instant::now();
    model
        .last_logits(&ids, &mut cache)?
        .to_device(&candle_core::Device::Cpu)?;
    Ok(start.elapsed().as_secs_f64())
}

/// Seconds of greedy decoding.
fn decode(model: &Llama, tokens: usize) -> Result<f64> {
    let mut cache = model.new_cache(1, PROMPT + tokens)?;
    let mut logits = model.last_logits(&prompt(model, PROMPT)?, &mut cache)?;
    let start = Instant::now();
    for _ in 0..tokens {
        let next = logits.argmax(1)?.unsqueeze(1)?;
        logits = model.last_logits(&next, &mut cache)?;
    }
    logits.to_device(&candle_core::Device::Cpu)?;
    Ok(start.elapsed().as_secs_f64())
}
