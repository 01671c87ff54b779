//! Trains an image classifier in scaled arithmetic, in FP8 or f16, or plainly in f32, and shows how scales move.
//!
//! `cargo run --release --example scaled_mnist -- --dtype fp8 --plot`

#[path = "../train_vision/data.rs"]
mod data;
#[path = "../shared/device.rs"]
mod device;
#[path = "../shared/end.rs"]
mod end;
#[path = "../shared/flags.rs"]
mod flags;
mod net;
mod plot;
#[path = "../shared/progress.rs"]
mod progress;
mod run;
#[allow(dead_code, reason = "train_gpt uses the rest")]
#[path = "../shared/runs.rs"]
mod runs;
mod watch;

use anyhow::{Result, ensure};
use clap::Parser;
use data::Data;
use end::end;
use flags::Flags;
use fp8::atomic::write_atomic;
use progress::Progress;
use run::{Precision, Settings, train};
use std::path::PathBuf;
use std::process::ExitCode;

/// Train an image classifier in scaled arithmetic.
#[derive(Parser)]
struct Args {
    /// What data are: f16 and fp8 are scaled, f32 is plain
    #[arg(long, value_enum, default_value = "fp8")]
    dtype: Precision,
    /// Seed of weights, order and rounding
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// A folder with Fashion-MNIST's (or MNIST's) four IDX files, packed with gzip or not, or `digits` [default: where Debian's
    /// dataset-fashion-mnist puts them, else the digits that come with the program]
    #[arg(long)]
    data: Option<PathBuf>,
    /// Passes over the training images [default: 2 for images of 28x28, 40 for the digits]
    #[arg(long)]
    epochs: Option<usize>,
    /// Images per step
    #[arg(long, default_value_t = 64)]
    batch: usize,
    /// The largest learning rate
    #[arg(long, default_value_t = 2e-3)]
    lr: f64,
    #[command(flatten)]
    flags: Flags,
    /// Draw how the scales of weights and gradients move: scales.svg
    #[arg(long)]
    plot: bool,
}

fn main() -> ExitCode {
    fp8::keep_freed_memory();
    end(example(&Args::parse()))
}

fn example(args: &Args) -> Result<()> {
    ensure!(args.batch > 0, "--batch 0: a step needs at least one image");
    ensure!(
        args.epochs != Some(0),
        "--epochs 0: there is nothing to train"
    );
    let device = args.flags.device.open()?;
    let data = Data::load(args.data.as_deref())?.on_device(&device)?;
    println!(
        "{}: {} of {}x{} to train with, {} to test",
        data.name,
        data.train.len(),
        data.size,
        data.size,
        data.test.len()
    );
    let out = args.flags.begin("target/scaled_mnist", false)?;
    let settings = Settings {
        dtype: args.dtype,
        seed: args.seed,
        epochs: (args.epochs).unwrap_or(if data.size > 16 { 2 } else { 40 }),
        batch: args.batch,
        lr: args.lr,
    };
    let mut bar = Progress::new("train", "{pos}/{len}")?;
    let (summary, watched) = train(&settings, &data, |step, steps, loss| {
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
    let path = out.join("summary.json");
    let json = serde_json::to_string_pretty(&summary)?;
    write_atomic(&path, |out| out.write_all(json.as_bytes()))?;
    println!("written: {}", path.display());
    Ok(())
}
