//! Trains an image classifier with FP8 recipes, the emulation methods and in f32, one after the other.
//!
//! `cargo run --release --example train_vision -- --recipe f32,direct,hybrid --model conv`

#[path = "../images/args.rs"]
mod args;
#[path = "../shared/curves.rs"]
mod curves;
#[path = "../shared/device.rs"]
mod device;
#[path = "../shared/end.rs"]
mod end;
#[path = "../shared/flags.rs"]
mod flags;
#[allow(dead_code, reason = "scaled_mnist uses the rest")]
#[path = "../images/mod.rs"]
mod images;
mod net;
#[allow(dead_code, reason = "scaled_mnist uses the rest")]
#[path = "../shared/parameters.rs"]
mod parameters;
mod plot;
#[path = "../shared/progress.rs"]
mod progress;
mod run;
#[allow(dead_code, reason = "train_gpt uses the rest")]
#[path = "../shared/runs.rs"]
mod runs;

use anyhow::{Context, Result};
use args::{ImageArgs, write_summary};
use clap::Parser;
use end::end;
use net::ModelName;
use progress::Progress;
use run::{Settings, train};
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
    /// Seeds of weights, order and rounding, separated by commas: a run of each recipe for each
    #[arg(long, value_delimiter = ',', default_value = "0")]
    seed: Vec<u64>,
    /// Layers that stay in high precision, paths or globs separated by commas; the toolkit's own examples leave out the first
    /// convolution and the last layer, here `convolutions.0,head`
    #[arg(long, value_delimiter = ',')]
    exempt: Vec<String>,
    #[command(flatten)]
    images: ImageArgs,
}

fn main() -> ExitCode {
    fp8::keep_freed_memory();
    end(example(&Args::parse()))
}

fn example(args: &Args) -> Result<()> {
    let data = args.images.load()?;
    let out = args.images.flags.begin("target/train_vision", false)?;
    let mut summaries = vec![];
    let mut curves = vec![];
    for name in &args.recipe {
        for &seed in &args.seed {
            let settings = Settings {
                model: args.model,
                epochs: args.images.epochs(&data, seed),
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
    plot::write_loss_svg(&out.join("loss.svg"), &curves)?;
    write_summary(&out, &summaries)
}
