//! The command line tool `fp8`: inspects, rewrites and runs checkpoints. One file for each command.

mod bench;
mod card;
mod check;
mod convert;
mod dequantize;
#[path = "../../examples/shared/device.rs"]
mod device;
mod diff;
mod embed;
#[path = "../../examples/shared/end.rs"]
mod end;
mod eval;
mod generate;
mod high_precision;
mod inspect;
mod layers;
mod logits;
mod merge;
mod model;
mod output;
mod progress;
mod quantize;
#[path = "../../examples/shared/requests.rs"]
mod requests;
#[path = "../../examples/shared/progress.rs"]
mod shown;
mod source;
#[cfg(test)]
mod tests;
mod texts;
mod train;
mod usage;
#[path = "../../examples/shared/watch.rs"]
mod watch;

use clap::{CommandFactory, Parser, Subcommand};
use std::process::ExitCode;

/// Inspect, make, rewrite and run FP8 checkpoints.
#[derive(Parser)]
#[command(name = "fp8", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show the family and the FP8 layers of a checkpoint.
    Inspect(inspect::Args),
    /// Check a checkpoint for faults that make it load without an error but compute nonsense.
    Check(check::Args),
    /// Quantize the linear layers of a model.
    Quantize(quantize::Args),
    /// Rewrite an FP8 checkpoint in another family's spelling, with the same numbers.
    Convert(convert::Args),
    /// Rewrite a checkpoint in high precision.
    Dequantize(dequantize::Args),
    /// Add an adapter of low rank (LoRA) to the weights of its base.
    Merge(merge::Args),
    /// Compare the weights of two checkpoints.
    Diff(diff::Args),
    /// Fine-tune a language model or an encoder, in full or by adapters.
    Train(Box<train::Args>),
    /// Continue a text with a language model.
    Generate(generate::Args),
    /// Compute the perplexity of a language model on a text, or the accuracy of an encoder.
    Eval(eval::Args),
    /// Compute embeddings of texts with an encoder.
    Embed(embed::Args),
    /// Compute the logits of token ids, or the features of an encoder, to compare with another framework.
    Logits(logits::Args),
    /// Measure how fast a language model reads and writes on this machine, or which layers are faster in FP8.
    Bench(Box<bench::Args>),
}

fn main() -> ExitCode {
    fp8::keep_freed_memory();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let given = std::env::args_os().nth(1);
            let given = given.map(|name| name.to_string_lossy().into_owned());
            let known = Cli::command();
            let known = given.filter(|name| known.find_subcommand(name).is_some());
            return usage::refuse(&error, known.as_deref());
        }
    };
    let result = match cli.command {
        Command::Check(args) => match check::run(&args) {
            Ok(code) => return code,
            Err(error) => Err(error),
        },
        Command::Inspect(args) => inspect::run(&args),
        Command::Quantize(args) => quantize::run(&args),
        Command::Convert(args) => convert::run(&args),
        Command::Dequantize(args) => dequantize::run(&args),
        Command::Merge(args) => merge::run(&args),
        Command::Diff(args) => diff::run(&args),
        Command::Train(args) => train::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Embed(args) => embed::run(&args),
        Command::Logits(args) => logits::run(&args),
        Command::Bench(args) => bench::run(*args),
    };
    match result {
        Err(error) if error.is::<usage::Usage>() => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
        Err(error) => match error.downcast_ref() {
            Some(usage::Interrupted(request)) => ExitCode::from(request.code()),
            None => end::end(Err(error)),
        },
        result => end::end(result),
    }
}
