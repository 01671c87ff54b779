//! Continues a prompt with a model that `train_gpt` saved. An FP8 file stays FP8 in memory.
//!
//! `cargo run --release --example generate -- --prompt "fn main" --tokens 200`

#[path = "../shared/device.rs"]
mod device;
#[path = "../shared/end.rs"]
mod end;
#[allow(dead_code, reason = "training uses the rest")]
#[path = "../gpt/mod.rs"]
mod gpt;
#[allow(dead_code, reason = "training uses the rest")]
#[path = "../shared/runs.rs"]
mod runs;
#[allow(dead_code, reason = "training learns it")]
#[path = "../shared/vocabulary.rs"]
mod vocabulary;

use anyhow::{Context, Result};
use candle_core::DType;
use clap::Parser;
use device::DeviceName;
use end::end;
use fp8::load;
use gpt::{Gpt, GptConfig};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;
use vocabulary::Vocabulary;

/// Continue a prompt with a model saved by train_gpt.
#[derive(Parser)]
struct Args {
    /// Folder with config.json and model.safetensors [default: where train_gpt last saved one under target]
    #[arg(long)]
    model: Option<PathBuf>,
    /// What to continue
    #[arg(long, default_value = "fn main")]
    prompt: String,
    /// Tokens to write: bytes, or merged pairs after train_gpt --vocab
    #[arg(long, default_value_t = 200)]
    tokens: usize,
    /// 0 always takes the likeliest token
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Seed of the sampling
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Where to run
    #[arg(long, default_value = "cpu")]
    device: DeviceName,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    fp8::keep_freed_memory();
    end(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let device = args.device.open()?;
    let folder = match &args.model {
        Some(folder) => folder.clone(),
        None => runs::newest_model(Path::new(runs::DEFAULT))?,
    };
    let config = folder.join("config.json");
    let config: GptConfig = serde_json::from_str(&runs::read(&config)?)
        .with_context(|| format!("{}: not a configuration of train_gpt", config.display()))?;
    let vocabulary = Vocabulary::open(&folder, config.vocab_size)?;
    let weights = folder.join("model.safetensors");
    let vb = load::var_builder(&[&weights], DType::F32, &device)?;
    let model = Gpt::new(&config, vb)?;
    let (bytes, f32_bytes) = model.linear_weight_bytes();

    if !args.json {
        print!("{}", args.prompt);
    }
    let start = Instant::now();
    let tokens = model.generate(
        &vocabulary.encode(args.prompt.as_bytes()),
        args.tokens,
        args.temperature,
        args.seed,
        |token| {
            if !args.json {
                // A token may end within a character, so bytes are written as they are.
                let mut out = std::io::stdout();
                let _ = out
                    .write_all(&vocabulary.decode(&[token]))
                    .and_then(|()| out.flush());
            }
        },
    )?;
    let seconds = start.elapsed().as_secs_f64();
    let tokens_per_s = if seconds > 0. {
        tokens.len() as f64 / seconds
    } else {
        0.
    };
    if args.json {
        let report = serde_json::json!({
            "prompt": args.prompt,
            "text": String::from_utf8_lossy(&vocabulary.decode(&tokens)),
            "tokens": tokens.len(),
            "tokens_per_s": tokens_per_s,
            "linear_weight_bytes": bytes,
            "f32_linear_weight_bytes": f32_bytes,
        });
        println!("{report}");
    } else {
        let share = bytes as f64 / f32_bytes.max(1) as f64;
        println!(
            "\n\n{tokens_per_s:.0} tokens/s; linear weights hold {bytes} bytes ({share:.3} of f32)"
        );
    }
    Ok(())
}
