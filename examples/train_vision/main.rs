//! Trains an image classifier with FP8 recipes, the emulation methods and in f32, one after the other.
//!
//! `cargo run --release --example train_vision -- --recipe f32,direct,hybrid --model conv`

#[path = "../shared/curves.rs"]
mod curves;
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

use anyhow::{Context, Result, ensure};
use clap::Parser;
use data::Data;
use end::end;
use flags::Flags;
use fp8::atomic::write_atomic;
use net::ModelName;
use progress::Progress;
use run::{Settings, train};
use std::path::PathBuf;
use std::process::ExitCode;

/// Train an image classifier with FP8 recipes, the emulation methods and in f32.
#[derive(Parser)]
struct Args {
    /// What to train, separated by commas: f32, direct, hybrid, tensorwise, rowwise, rowwise_with_gw_hp, delayed, current,
    /// blockwise, mxfp8
    #[arg(long, value_delimiter = ',', default_value = "f32,direct,hybrid")]
    recipe: Vec<String>,
    #[arg(long, value_enum, default_value = "mlp")]
    model: ModelName,
    /// Passes over the training images [default: 2 for images of 28x28, 40 for the digits]
    #[arg(long)]
    epochs: Option<usize>,
    /// Images per step
    #[arg(long, default_value_t = 64)]
    batch: usize,
    /// The largest learning rate
    #[arg(long, default_value_t = 2e-3)]
    lr: f64,
    /// Seeds of weights, order and rounding, separated by commas: a run of each recipe for each
    #[arg(long, value_delimiter = ',', default_value = "0")]
    seed: Vec<u64>,
    /// Layers that stay in high precision, paths or globs separated by commas; the toolkit's own examples leave out the first
    /// convolution and the last layer, here `convolutions.0,head`
    #[arg(long, value_delimiter = ',')]
    exempt: Vec<String>,
    /// A folder with Fashion-MNIST's (or MNIST's) four IDX files, packed with gzip or not, or `digits` [default: where Debian's
    /// dataset-fashion-mnist puts them, else the digits that come with the program]
    #[arg(long)]
    data: Option<PathBuf>,
    #[command(flatten)]
    flags: Flags,
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
    let out = args.flags.begin("target/train_vision", false)?;
    let default_epochs = if data.size > 16 { 2 } else { 40 };
    let mut summaries = vec![];
    let mut curves = vec![];
    for name in &args.recipe {
        for &seed in &args.seed {
            let settings = Settings {
                model: args.model,
                epochs: args.epochs.unwrap_or(default_epochs),
                batch: args.batch,
                lr: args.lr,
                seed,
                exempt: args.exempt.clone(),
            };
            let mut bar = Progress::new(name, "{pos}/{len}")?;
            let (summary, losses) = train(name, &settings, &data, |step, steps, loss| {
                bar.show(step, steps, &format!("loss {loss:.4}"));
            })
            .with_context(|| format!("training {name}"))?;
            drop(bar);
            println!(
                "{name:20} seed {seed}  train loss {:.4}  test accuracy {:.4}  skipped {}  loss scale {}",
                summary.final_train_loss,
                summary.test_accuracy,
                summary.skipped_steps,
                summary.loss_scale
            );
            curves.push((format!("{name}, seed {seed}"), losses));
            summaries.push(summary);
        }
    }
    let path = out.join("summary.json");
    let json = serde_json::to_string_pretty(&summaries)?;
    write_atomic(&path, |out| out.write_all(json.as_bytes()))?;
    plot::write_loss_svg(&out.join("loss.svg"), &curves)?;
    println!("written: {}", path.display());
    Ok(())
}
