//! Trains an image classifier in scaled arithmetic, in FP8 or f16, or plainly in f32, and shows how scales move.
//!
//! `cargo run --release --example scaled_mnist -- --dtype fp8 --plot`

#[path = "../images/args.rs"]
mod args;
#[path = "../shared/device.rs"]
mod device;
#[path = "../shared/end.rs"]
mod end;
#[path = "../shared/flags.rs"]
mod flags;
#[path = "../images/mod.rs"]
mod images;
mod net;
#[path = "../shared/parameters.rs"]
mod parameters;
mod plot;
#[path = "../shared/progress.rs"]
mod progress;
mod run;
#[allow(dead_code, reason = "train_gpt uses the rest")]
#[path = "../shared/runs.rs"]
mod runs;
mod watch;

use anyhow::Result;
use args::{ImageArgs, write_summary};
use clap::Parser;
use end::end;
use progress::Progress;
use run::{Precision, train};
use std::process::ExitCode;

/// Train an image classifier in scaled arithmetic.
#[derive(Parser)]
struct Args {
    /// Format of the data: f16 and fp8 are scaled, f32 is plain
    #[arg(long, value_enum, default_value = "fp8")]
    dtype: Precision,
    /// Seed of weights, order and rounding
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    images: ImageArgs,
    /// Draw how the scales of weights and gradients move: scales.svg
    #[arg(long)]
    plot: bool,
}

fn main() -> ExitCode {
    fp8::keep_freed_memory();
    end(example(&Args::parse()))
}

fn example(args: &Args) -> Result<()> {
    let data = args.images.load()?;
    let out = args.images.flags.begin("target/scaled_mnist", false)?;
    let epochs = args.images.epochs(&data, args.seed);
    let mut bar = Progress::new("train", "{pos}/{len}")?;
    let (summary, watched) = train(args.dtype, &epochs, &data, |step, steps, loss| {
        bar.show(step, steps, &format!("loss {loss:.4}"));
    })?;
    drop(bar);
    print!("{watched}");
    println!(
        "{}, seed {}: train loss {:.4}, test accuracy {:.4}, {} products in FP8",
        summary.dtype,
        summary.seed,
        summary.final_train_loss,
        summary.test_accuracy,
        summary.fp8_matmuls
    );
    if args.plot {
        let path = out.join("scales.svg");
        plot::write_scales_svg(&path, &watched.panels())?;
        println!("written: {}", path.display());
    }
    write_summary(&out, &summary)
}
