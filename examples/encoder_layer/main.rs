//! Times forward and backward of one GPT encoder layer in training, by default in the sizes of Transformer Engine's
//! tutorial. An optimizer step between the timed parts changes the weights, so each part casts them.
//!
//! `cargo run --release --features cuda --example encoder_layer -- --device cuda --dtype bf16 --fp8 delayed`

#[path = "../shared/clock.rs"]
mod clock;
#[path = "../shared/device.rs"]
mod device;
#[path = "../shared/end.rs"]
mod end;
#[allow(dead_code, reason = "the CUDA bench uses the rest")]
mod layer;
#[path = "../shared/spread.rs"]
mod spread;
#[path = "../shared/upstream.rs"]
mod upstream;

use anyhow::{Result, ensure};
use candle_core::DType;
use clap::{Parser, ValueEnum};
use clock::Clock;
use device::DeviceName;
use end::end;
use fp8::RecipeName;
use layer::attention::Operands;
use layer::{LayerConfig, LayerStep};
use spread::Spread;
use std::process::ExitCode;

/// Time forward and backward of a GPT encoder layer.
#[derive(Parser)]
struct Args {
    /// Dtype of parameters and activations
    #[arg(long, default_value = "bf16")]
    dtype: DTypeName,
    /// Recipe of the linear layers: tensorwise, rowwise, rowwise_with_gw_hp, delayed, or off
    #[arg(long, default_value = "off", value_parser = recipe)]
    fp8: Fp8,
    /// Where to run
    #[arg(long, default_value = "cpu")]
    device: DeviceName,
    /// Hidden size
    #[arg(long, default_value_t = LayerConfig::default().hidden)]
    hidden: usize,
    /// Tokens of a sequence
    #[arg(long, default_value_t = LayerConfig::default().sequence)]
    sequence: usize,
    /// Sequences
    #[arg(long, default_value_t = LayerConfig::default().batch)]
    batch: usize,
    /// Hidden size of the MLP
    #[arg(long, default_value_t = LayerConfig::default().ffn)]
    ffn: usize,
    /// Attention heads
    #[arg(long, default_value_t = LayerConfig::default().heads)]
    heads: usize,
    /// Let tokens attend to earlier ones only
    #[arg(long)]
    causal: bool,
    /// Operands of attention's products [default: bf16 with a recipe, else f32: tensors as they are]
    #[arg(long)]
    attention: Option<Operands>,
    /// Let a GPU round the operands of f32 products to TF32
    #[arg(long)]
    tf32: bool,
    /// Timed steps
    #[arg(long, default_value_t = 20)]
    iterations: usize,
    /// Steps before them
    #[arg(long, default_value_t = 20)]
    warmup: usize,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum DTypeName {
    F32,
    Bf16,
    F16,
}

impl DTypeName {
    fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
        }
    }
}

/// None is `off`.
#[derive(Clone, Copy)]
struct Fp8(Option<RecipeName>);

fn recipe(text: &str) -> Result<Fp8> {
    Ok(Fp8(match text {
        "off" => None,
        name => Some(name.parse()?),
    }))
}

fn main() -> ExitCode {
    fp8::keep_freed_memory();
    end(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let config = LayerConfig {
        hidden: args.hidden,
        sequence: args.sequence,
        batch: args.batch,
        ffn: args.ffn,
        heads: args.heads,
        causal: args.causal,
        attention: args.attention,
    };
    let sizes = [args.sequence, args.batch, args.ffn, args.iterations];
    ensure!(
        !sizes.contains(&0),
        "--sequence, --batch, --ffn and --iterations are at least 1"
    );
    let (dtype, Fp8(recipe)) = (args.dtype.dtype(), args.fp8);
    let device = args.device.open()?;
    candle_core::cuda::set_gemm_reduced_precision_f32(args.tf32);
    let step = LayerStep::new(config, dtype, recipe, &device)?;
    let mut optimizer = step.optimizer()?;
    let grads = step.run()?;
    step.check(&grads)?;
    optimizer.apply(&grads)?;
    for _ in 1..args.warmup {
        optimizer.apply(&step.run()?)?;
    }
    // Times are read at the end: on CUDA the host runs ahead, as in training.
    let clock = Clock::new(&device);
    let mut marks = vec![];
    for _ in 0..args.iterations {
        let begin = clock.mark()?;
        let grads = step.run()?;
        marks.push((begin, clock.mark()?));
        optimizer.apply(&grads)?;
    }
    let times = marks
        .iter()
        .map(|(begin, end)| begin.ms_until(end))
        .collect::<Result<Vec<_>>>()?;
    let Spread { median, min, max } = Spread::of(times)?;
    let tokens_per_s = config.tokens() as f64 / median * 1e3;
    let tflops = config.flop() / median * 1e-9;
    let place = if device.is_cuda() { "cuda" } else { "cpu" };
    let fp8 = recipe.map_or("off", RecipeName::as_str);
    if args.json {
        let report = serde_json::json!({
            "device": place,
            "dtype": dtype.as_str(),
            "fp8": fp8,
            "hidden": config.hidden,
            "sequence": config.sequence,
            "batch": config.batch,
            "ffn": config.ffn,
            "heads": config.heads,
            "causal": config.causal,
            "attention": config.attention.unwrap_or(Operands::of_run(recipe.is_some())),
            "tf32": args.tf32,
            "iterations": args.iterations,
            "ms": median,
            "min_ms": min,
            "max_ms": max,
            "tokens_per_s": tokens_per_s,
            "tflop_per_s": tflops,
        });
        println!("{report}");
    } else {
        println!(
            "{place} {} fp8 {fp8}: {median:.2} ms (median of {}, {min:.2} to {max:.2}), {tokens_per_s:.0} tokens/s, {tflops:.2} TFLOP/s",
            dtype.as_str(),
            args.iterations,
        );
    }
    Ok(())
}
