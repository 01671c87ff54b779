//! What a policy generates, and what its trainer computes of it: several sequences are generated together, token by token with caches, and
//! each token's log-probability is compared with that of the trainer's forward pass over the whole sequence.
//!
//! `cargo run --release --example rollout -- --tokens 100000`

#[path = "../shared/end.rs"]
mod end;
mod model;

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use clap::Parser;
use end::end;
use fp8::models::{CausalLm, Llama};
use fp8::nn::loss::cross_entropy;
use fp8::rewrite::Scheme;
use fp8::training::TrainableModel;
use std::path::PathBuf;
use std::process::ExitCode;

/// Compare the log-probabilities of generated tokens with those of the trainer.
#[derive(Parser)]
pub struct Args {
    /// The model: a directory with safetensors files [default: a small one with random weights, in f32 and in FP8]
    #[arg(long)]
    model: Option<PathBuf>,
    /// Tokens to generate of each model, at least
    #[arg(long, default_value_t = 10_000)]
    tokens: usize,
    /// Sequences that are generated together
    #[arg(long, default_value_t = 8)]
    sequences: usize,
    /// Tokens of a sequence
    #[arg(long, default_value_t = 256)]
    length: usize,
}

fn main() -> ExitCode {
    fp8::keep_freed_memory();
    end(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    ensure!(
        args.tokens > 0 && args.sequences > 0 && (1..model::POSITIONS).contains(&args.length),
        "--tokens and --sequences are at least 1, --length is at least 1 and below {}",
        model::POSITIONS
    );
    if let Some(folder) = &args.model {
        let model = model::opened(folder)?;
        return compare(&folder.display().to_string(), &model, &model, args);
    }
    let folder = tempfile::tempdir()?;
    model::write(folder.path())?;
    let trained = TrainableModel::open(folder.path(), DType::F32, &Device::Cpu)?;
    let trained = trained.model.llama().expect("it was written as one");
    compare("f32", &model::opened(folder.path())?, trained, args)?;
    for scheme in [Scheme::StaticTensor, Scheme::ChannelToken] {
        let target = folder.path().join(scheme.to_string());
        model::quantize(folder.path(), &target, scheme)?;
        let model = model::opened(&target)?;
        compare(&scheme.to_string(), &model, &model, args)?;
    }
    Ok(())
}

/// Generates with `policy`, and fails if `trainer` gives a token another log-probability.
fn compare(name: &str, policy: &Llama, trainer: &Llama, args: &Args) -> Result<()> {
    let (mut tokens, mut apart, mut largest) = (0, 0, 0f32);
    let mut random = Random(1);
    while tokens < args.tokens {
        for (sequence, generated) in rollouts(policy, args, &mut random)? {
            // Every token but the last has a successor.
            let ids = Tensor::from_slice(&sequence, (1, sequence.len()), &Device::Cpu)?;
            let logits = trainer.forward(&ids)?.squeeze(0)?;
            for (place, generated) in generated.into_iter().enumerate() {
                let trained = log_probability(&logits.narrow(0, place, 1)?, sequence[place + 1])?;
                tokens += 1;
                apart += usize::from(trained.to_bits() != generated.to_bits());
                largest = largest.max((trained - generated).abs());
            }
        }
    }
    println!("{name}: {tokens} tokens, {apart} log-probabilities differ, by at most {largest:e}");
    ensure!(apart == 0, "{name}: {apart} log-probabilities differ");
    Ok(())
}

/// Sequences of `length + 1` tokens, and the log-probability of each token after the first.
fn rollouts(policy: &Llama, args: &Args, random: &mut Random) -> Result<Vec<(Vec<u32>, Vec<f32>)>> {
    let vocabulary = policy.vocab_size() as f64;
    let begin = |_| (vec![(random.next() * vocabulary) as u32], vec![]);
    let mut rollouts: Vec<(Vec<u32>, Vec<f32>)> = (0..args.sequences).map(begin).collect();
    let caches = (0..args.sequences).map(|_| policy.new_cache(1, args.length));
    let mut caches = caches.collect::<fp8::models::Result<Vec<_>>>()?;
    for place in 0..args.length {
        let ids: Vec<u32> = rollouts.iter().map(|(tokens, _)| tokens[place]).collect();
        let logits = policy.step(&ids, &mut caches.iter_mut().collect::<Vec<_>>())?;
        for (row, (tokens, log_probabilities)) in rollouts.iter_mut().enumerate() {
            let logits = logits.narrow(0, row, 1)?;
            let token = random.token(&logits.squeeze(0)?.to_dtype(DType::F32)?.to_vec1()?);
            log_probabilities.push(log_probability(&logits, token)?);
            tokens.push(token);
        }
    }
    Ok(rollouts)
}

/// From logits `[1, vocabulary]`.
fn log_probability(logits: &Tensor, token: u32) -> Result<f32> {
    let token = Tensor::from_slice(&[token], 1, logits.device())?;
    let loss = cross_entropy(&logits.to_dtype(DType::F32)?, &token)?;
    Ok(-loss.to_scalar::<f32>()?)
}

/// A generator of numbers from 0 to 1.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(11);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A token, by its probability.
    fn token(&mut self, logits: &[f32]) -> u32 {
        let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights = logits.iter().map(|x| f64::from(x - top).exp());
        let mut left = self.next() * weights.clone().sum::<f64>();
        let place = weights.into_iter().position(|weight| {
            left -= weight;
            left < 0.
        });
        place.unwrap_or(logits.len() - 1) as u32
    }
}
