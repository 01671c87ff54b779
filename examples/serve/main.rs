//! Several client threads share one language model: each gets its text as it is made, and all are computed together.
//!
//! `cargo run --release --example serve -- --model smol-fp8 --clients 1,2,4,8`

mod clients;
#[path = "../shared/end.rs"]
mod end;
#[path = "../shared/spread.rs"]
mod spread;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use clients::Round;
use end::end;
use fp8::models::gguf::{GgufFile, is_gguf};
use fp8::models::{GenerationOptions, Model, ModelOptions, Tokenizer, open};
use fp8::serving::{Server, ServerOptions};
use spread::Spread;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// Serve one language model to several client threads.
#[derive(Parser)]
struct Args {
    /// The model: a directory with safetensors files, or a GGUF file
    #[arg(long)]
    model: PathBuf,
    /// How many clients, separated by commas: the numbers take turns
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8")]
    clients: Vec<usize>,
    /// New tokens of each request
    #[arg(long, default_value_t = 64)]
    tokens: usize,
    /// How often each number of clients has its turn
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// The prompt of each client, which its number precedes
    #[arg(long, default_value = ". Once upon a time")]
    prompt: String,
    /// 0 always takes the likeliest token
    #[arg(long, default_value_t = 0.7)]
    temperature: f64,
    /// Do not print the texts
    #[arg(long)]
    quiet: bool,
}

fn main() -> ExitCode {
    fp8::keep_freed_memory();
    end(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    ensure!(
        args.rounds > 0 && args.tokens > 0 && !args.clients.contains(&0),
        "--rounds, --tokens and --clients are at least 1"
    );
    let Model::Llama(model) = open(&args.model, &ModelOptions::new())? else {
        bail!("{}: not a language model", args.model.display());
    };
    let tokenizer = match is_gguf(&args.model) {
        true => Tokenizer::from_gguf(&GgufFile::open(&args.model)?)?,
        false => Tokenizer::open(&args.model)?,
    };
    let most = args.clients.iter().copied().max().context("no clients")?;
    let options = ServerOptions::default().with_max_waiting(most);
    let server = Server::with_tokenizer(Arc::new(model), tokenizer.into(), &options)?;
    let generation = GenerationOptions::default()
        .with_max_new_tokens(args.tokens)
        .with_temperature(args.temperature)
        .with_ignore_eos(true);
    let mut rates = vec![vec![]; args.clients.len()];
    let mut waits = vec![vec![]; args.clients.len()];
    for number in 0..args.rounds {
        for (i, &clients) in args.clients.iter().enumerate() {
            let round = Round {
                server: &server,
                options: &generation,
                prompt: &args.prompt,
                clients,
                shows: number == 0 && !args.quiet,
            };
            let result = round.run()?;
            rates[i].push(result.tokens as f64 / result.time.as_secs_f64());
            waits[i].extend(result.first.iter().map(Duration::as_secs_f64));
        }
    }
    println!("clients  tokens/s: median, least, most   first token after");
    for ((clients, rates), waits) in args.clients.iter().zip(rates).zip(waits) {
        let (rate, wait) = (Spread::of(rates)?, Spread::of(waits)?.median * 1e3);
        println!(
            "{clients:7} {:17.1} {:6.1} {:6.1} {wait:16.0} ms",
            rate.median, rate.min, rate.max
        );
    }
    match clients::cancelled(&server, &generation, &args.prompt, most)? {
        Some(after) => println!(
            "a cancelled request of {most} ended after {:.0} ms",
            after.as_secs_f64() * 1e3
        ),
        None => println!("no request was left to cancel: give more --tokens"),
    }
    server.drain();
    Ok(())
}
